// Low-latency dispatch. Every rank stages its rows once, as they travel, with the routes of their
// tokens; a receiver reads each row that it wants once and writes it to all its experts, packed in
// order of source rank, then token. The place of a (token, expert) among its rank's rows for the
// expert is the number of them before it, so results repeat bit for bit.
#include "device/quantize.cuh"
#include "kernels/low_latency_signals.cuh"

namespace moe_ep {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;

// -- send -----------------------------------------------------------------------------------------

constexpr int kPairs = 2048;  // (token, k) pairs that a block routes at a time

// A block's knowledge of the routing, in shared memory.
struct Routing {
  int32_t next[kMaxExperts + 1];  // next free place of each expert; [E] counts what is bad
  int32_t expert[kPairs];         // of the pairs at hand, -1: unused, E: bad
};

// The tokens of a block: [begin, end), `step` of them routed at a time.
struct Share {
  int begin, end, step;
};

__device__ __forceinline__ Share share_of_block(const LowLatencyDispatchArgs& args) {
  const uint32_t num_tokens = args.num_tokens;
  const uint32_t per_block = (num_tokens + gridDim.x - 1) / gridDim.x;
  const uint32_t begin = min(blockIdx.x * per_block, num_tokens);
  return {static_cast<int>(begin), static_cast<int>(min(begin + per_block, num_tokens)),
          static_cast<int>(args.view.slots.quotient(kPairs))};
}

// A unit: 32 vectors of a row, one of each lane.
struct Unit {
  int token, part;
};

// Units warp, warp + kLowLatencyWarps, ... of the block's rows, one after the other.
struct Units {
  Unit at;
  int num_parts, step_tokens, step_parts;

  __device__ __forceinline__ Units(const Share& share, const Divisor& parts)
      : num_parts(parts.divisor), step_tokens(parts.quotient(kLowLatencyWarps)) {
    step_parts = parts.remainder(kLowLatencyWarps, step_tokens);
    const uint32_t warp = threadIdx.x / kWarp, token = parts.quotient(warp);
    at = {share.begin + static_cast<int>(token), static_cast<int>(parts.remainder(warp, token))};
  }
  __device__ __forceinline__ Unit next() {
    const Unit now = at;
    at.token += step_tokens;
    at.part += step_parts;
    if (at.part >= num_parts) {
      at.part -= num_parts;
      ++at.token;
    }
    return now;
  }
};

// What a warp loads of rows before it stores any.
constexpr int kUnits = 8;
struct RowUnits {
  uint4 v[kUnits];
};

__device__ __forceinline__ void load_units(const LowLatencyDispatchArgs& args, const Share& share,
                                           Units units, RowUnits& out) {
  const int vectors = args.view.shape.hidden / kFp8Columns;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const Unit unit = units.next();
    const int vector = unit.part * kWarp + static_cast<int>(threadIdx.x) % kWarp;
    const int64_t token = unit.token;
    out.v[i] = load_or_zero(args.x + (token * vectors + vector) * kVectorBytes,
                            token < share.end && vector < vectors);
  }
}

template <bool kFp8>
__device__ __forceinline__ void stage_units(const LowLatencyDispatchArgs& args, const Share& share,
                                            const LowLatencyBuffer& buffer, Units& units,
                                            RowUnits& values) {
  const LowLatencyView& view = args.view;
  const int vectors = view.shape.hidden / kFp8Columns;
  char* rows = view.comm.peers[view.comm.rank] + buffer.rows;
#pragma unroll 1  // a longer program would have to be fetched
  for (int i = 0; i < kUnits; ++i) {
    const Unit unit = units.next();
    if (unit.token >= share.end) break;  // of the whole warp
    const uint4 now = values.v[0];
#pragma unroll
    for (int j = 1; j < kUnits; ++j) values.v[j - 1] = values.v[j];
    const int vector = unit.part * kWarp + static_cast<int>(threadIdx.x) % kWarp;
    char* row = rows + unit.token * view.layout.row_bytes;
    if (!kFp8) {
      if (vector < vectors) ptx::store_row16(row + vector * kVectorBytes, now);
      continue;
    }
    float f[kFp8Columns], scale;
    unpack(now, f, __nv_bfloat16());
    const uint2 q = quantize_vector(f, args.power_of_two_scales != 0, scale);
    if (vector >= vectors) continue;
    ptx::store_row8(row + vector * kFp8Columns, q);
    if (vector % kLanesPerScale != 0) continue;
    reinterpret_cast<float*>(row + view.shape.hidden)[vector / kLanesPerScale] = scale;
  }
}

// Loads the experts of pairs [first, first + count) and counts those before `first`, if asked to.
// All threads call it; a barrier must follow.
__device__ __forceinline__ void load_experts(const LowLatencyDispatchArgs& args, Routing& routing,
                                             int64_t first, int count, bool count_before) {
  const int64_t begin = count_before ? 0 : first;
#pragma unroll 2
  for (int64_t i = begin + threadIdx.x; i < first + count; i += kLowLatencyThreads) {
    const int expert =
        min(load_expert(args.topk_idx, args.topk_is_64_bit != 0, i), args.view.shape.num_experts);
    if (i >= first) {
      routing.expert[i - first] = expert;
    } else if (expert >= 0) {
      atomicAdd(&routing.next[expert], 1);  // a count: the order doesn't matter
    }
  }
}

// Gives the `count` pairs from `first` on their places, in order, and publishes them. One warp
// calls it.
__device__ __forceinline__ void publish_routes(const LowLatencyDispatchArgs& args,
                                               const LowLatencyBuffer& buffer, Routing& routing,
                                               int64_t first, int count) {
  const LowLatencyView& view = args.view;
  const uint32_t lane = threadIdx.x % kWarp, lower = (1u << lane) - 1;
  char* memory = view.comm.peers[view.comm.rank];
  Route* routes = reinterpret_cast<Route*>(memory + buffer.routes);
  int32_t* order = reinterpret_cast<int32_t*>(memory + buffer.order);
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kWarp) {
    const int i = begin + static_cast<int>(lane);
    const int expert = i < count ? routing.expert[i] : -1;
    const uint32_t same = __match_any_sync(kAllLanes, expert);
    const int index = expert < 0 ? -1 : routing.next[expert] + __popc(same & lower);
    __syncwarp();
    if (expert >= 0 && same >> lane == 1) routing.next[expert] = index + 1;  // its highest lane
    __syncwarp();
    if (i >= count) continue;
    const bool sent =
        index >= 0 && index < view.shape.max_tokens && expert < view.shape.num_experts;
    routes[first + i] = {sent ? expert : -1, sent ? index : -1};
    args.index[first + i] = sent ? index : -1;
    if (sent) {
      const int64_t place = static_cast<int64_t>(expert) * view.shape.max_tokens + index;
      order[place] = static_cast<int32_t>(first) + i;
    }
  }
}

// Publishes the routes of the block's tokens, whose first pairs are in `routing`. Afterwards the
// first warp finds all tokens up to the block's last one counted in `routing.next`. All threads
// call it.
__device__ __forceinline__ void stage_routes(const LowLatencyDispatchArgs& args, const Share& share,
                                             const LowLatencyBuffer& buffer, Routing& routing) {
  for (int token = share.begin; token < share.end; token += share.step) {
    const int64_t first = static_cast<int64_t>(token) * args.view.shape.num_slots;
    const int count = min(share.step, share.end - token) * args.view.shape.num_slots;
    if (token != share.begin) {
      __syncthreads();
      load_experts(args, routing, first, count, false);
      __syncthreads();
    }
    if (threadIdx.x < kWarp) publish_routes(args, buffer, routing, first, count);
  }
}

// Tells every peer how many rows it gets for each of its experts. Called by the first warp of the
// block that counted all tokens.
__device__ __forceinline__ void signal_counts(const LowLatencyDispatchArgs& args,
                                              const LowLatencyBuffer& buffer,
                                              const Routing& routing, uint64_t operation) {
  const LowLatencyView& view = args.view;
  const LowLatencyShape& shape = view.shape;
  const int local = shape.num_experts / shape.num_ranks;
  bool bad = view.comm.bad_input != 0 || routing.next[shape.num_experts] != 0;
  for (int i = threadIdx.x; i < shape.num_experts; i += kWarp) {
    bad = bad || routing.next[i] > shape.max_tokens;
  }
  bad = __any_sync(kAllLanes, bad) != 0;
  for (int i = threadIdx.x; i < shape.num_experts; i += kWarp) {
    // Starting with this rank's own experts: no two ranks begin with the same peer.
    const int expert = (i + view.comm.rank * local) % shape.num_experts;
    const int count = min(routing.next[expert], shape.max_tokens);
    const int place = expert % local * shape.num_ranks + view.comm.rank;
    ptx::store_relaxed_system(word_at(view, expert / local, buffer.counts, place),
                              ready_word(operation, view.tag, bad, count));
  }
  signal_senders(view, operation, gridDim.x, args.num_tokens);
  if (bad && threadIdx.x == 0) view.comm.host->bad_peer = view.comm.rank + 1;
}

__device__ __forceinline__ void clear_counts(const LowLatencyShape& shape, Routing& routing) {
  for (int i = threadIdx.x; i <= shape.num_experts; i += kLowLatencyThreads) routing.next[i] = 0;
  __syncthreads();
}

// After clear_counts. What needs no peer comes first.
template <bool kFp8>
__device__ bool send(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                     Routing& routing, uint64_t operation, bool aborted) {
  const LowLatencyView& view = args.view;
  const Share share = share_of_block(args);
  Units units(share, args.stage_parts);
  RowUnits values;
  load_units(args, share, units, values);
  const int at_first = min(share.step, share.end - share.begin) * view.shape.num_slots;
  load_experts(args, routing, static_cast<int64_t>(share.begin) * view.shape.num_slots, at_first,
               true);
  const bool goes_on = !aborted && poll_buffer_free(view, operation);
  if (__syncthreads_and(goes_on) == 0) return false;
  stage_routes(args, share, buffer, routing);
  // The last block has counted all tokens.
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < kWarp)
    signal_counts(args, buffer, routing, operation);
  while (units.at.token < share.end) {
    stage_units<kFp8>(args, share, buffer, units, values);
    if (units.at.token < share.end) load_units(args, share, units, values);
  }
  signal_block(view, buffer.blocks, operation);
  count_operation(view, operation);
  return true;
}

// -- receive --------------------------------------------------------------------------------------

// What a block knows of what arrives, in shared memory.
struct Arrival {
  int32_t count[kMaxExperts];  // rows of segment (local expert, source rank)
  Senders senders;
};

// Place of the first row of a source among those of a local expert.
__device__ __forceinline__ int first_position(const LowLatencyShape& shape, const Arrival& arrival,
                                              int local_expert, int source) {
  const int32_t* count = arrival.count + local_expert * shape.num_ranks;
  int position = 0;
  for (int i = 0; i < source; ++i) position += count[i];
  return position;
}

// One block writes what describes the result.
__device__ __forceinline__ void describe(const LowLatencyDispatchArgs& args,
                                         const Arrival& arrival) {
  const LowLatencyShape& shape = args.view.shape;
  for (int i = threadIdx.x; i < shape.num_experts; i += kLowLatencyThreads) {
    const int expert = static_cast<int>(args.view.ranks.quotient(i));
    const int source = static_cast<int>(args.view.ranks.remainder(i, expert));
    const int64_t first = first_position(shape, arrival, expert, source);
    args.layout_range[i] = first << 32 | arrival.count[i];
    if (source != shape.num_ranks - 1) continue;
    const int count = static_cast<int>(first) + arrival.count[i];
    args.recv_count[expert] = count;
    if (args.expert_stats != nullptr) args.expert_stats[expert] += count;
  }
}

// A piece of a staged row. Lane k has the route of slot k.
struct Incoming {
  int64_t token;
  int32_t source, piece;
  Route route;  // expert -1: nowhere
};

// The number of units is pieces * R * (most tokens of a source); beyond it nothing is here.
__device__ __forceinline__ Incoming look_up(const LowLatencyDispatchArgs& args,
                                            const Senders& senders, const LowLatencyBuffer& buffer,
                                            int u) {
  const LowLatencyView& view = args.view;
  const int lane = threadIdx.x % kWarp, slots = view.shape.num_slots;
  const uint32_t row = args.pieces.quotient(u), token = view.ranks.quotient(row);
  const int place = static_cast<int>(view.ranks.remainder(row, token)) + view.comm.rank;
  Incoming in{token,
              place < view.shape.num_ranks ? place : place - view.shape.num_ranks,
              static_cast<int32_t>(args.pieces.remainder(u, row)),
              {-1, -1}};
  if (lane >= slots || in.token >= senders.tokens[in.source]) return in;
  const char* routes = view.comm.peers[in.source] + buffer.routes;
  const uint2 route =
      ptx::load_row8(reinterpret_cast<const Route*>(routes) + (in.token * slots + lane));
  in.route = {static_cast<int32_t>(route.x), static_cast<int32_t>(route.y)};
  return in;
}

__device__ __forceinline__ void pack_piece(const LowLatencyDispatchArgs& args,
                                           const Arrival& arrival, const Incoming& in,
                                           const LowLatencyBuffer& buffer, int lane) {
  const LowLatencyView& view = args.view;
  const RowShape& row_shape = args.row_shape;
  const int local = static_cast<int>(view.ranks.quotient(view.shape.num_experts));
  const int local_expert = in.route.expert - view.comm.rank * local;
  const bool here = in.route.expert >= 0 && local_expert >= 0 && local_expert < local;
  uint32_t wanted = __ballot_sync(kAllLanes, here);
  if (wanted == 0) return;
  const int64_t num_rows = static_cast<int64_t>(view.shape.num_ranks) * view.shape.max_tokens;
  const char* source = view.comm.peers[in.source] + buffer.rows + in.token * view.layout.row_bytes;
  const int vectors = row_shape.vectors_of(in.piece);
  const int64_t offset = row_shape.offset_of(in.piece);
  Piece piece;
  load_piece(piece, source + offset, vectors, lane);
  int64_t to = 0;  // the row in the result
  if (here) {
    to = local_expert * num_rows + in.route.index +
         first_position(view.shape, arrival, local_expert, in.source);
  }
#pragma unroll 1
  for (; wanted != 0; wanted &= wanted - 1) {
    const int64_t row = __shfl_sync(kAllLanes, to, __ffs(wanted) - 1);
    store_piece(piece, args.rows + row * row_shape.row_bytes + offset, vectors, lane);
  }
}

// Four scales of a row, columns 4 * part and the next ones.
__device__ __forceinline__ void store_scales(const LowLatencyDispatchArgs& args,
                                             const uint4& scales, int64_t expert, int part,
                                             int64_t place) {
  const LowLatencyShape& shape = args.view.shape;
  const int64_t num_rows = static_cast<int64_t>(shape.num_ranks) * shape.max_tokens;
  const int num_columns = shape.hidden / kFp8Block;
  const uint32_t bits[] = {scales.x, scales.y, scales.z, scales.w};
  uint32_t* out = static_cast<uint32_t*>(args.scales) + place;
  if (args.pack_scales != 0) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // of a power of two, the exponent is all there is
      word |= (bits[j] >> 23 & 0xffu) << (8 * j);
    }
    out[(expert * (num_columns / 4) + part) * num_rows] = word;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int column = 4 * part + j;
    if (column < num_columns) out[(expert * num_columns + column) * num_rows] = bits[j];
  }
}

// Writes what belongs to rows, 32 rows of a segment at a time, so that what lies side by side is
// written at once: where they come from, and their scales, four columns of them in one part.
template <bool kFp8>
__device__ __forceinline__ void label_rows(const LowLatencyDispatchArgs& args,
                                           const Arrival& arrival, const LowLatencyBuffer& buffer) {
  const LowLatencyView& view = args.view;
  const LowLatencyShape& shape = view.shape;
  const int lane = threadIdx.x % kWarp, num_columns = shape.hidden / kFp8Block;
  const int num_parts = kFp8 ? 1 + (num_columns + 3) / 4 : 1;
  const int local = static_cast<int>(view.ranks.quotient(shape.num_experts));
  const int64_t num_rows = static_cast<int64_t>(shape.num_ranks) * shape.max_tokens;
#pragma unroll 1
  for (int u = first_unit(); u < shape.num_experts * num_parts; u += unit_step()) {
    const int part = u / shape.num_experts, segment = u - part * shape.num_experts;
    const int expert = static_cast<int>(view.ranks.quotient(segment));
    const int source = static_cast<int>(view.ranks.remainder(segment, expert));
    const int count = arrival.count[segment];
    const char* memory = view.comm.peers[source];
    const int32_t* order = reinterpret_cast<const int32_t*>(memory + buffer.order) +
                           static_cast<int64_t>(view.comm.rank * local + expert) * shape.max_tokens;
    const int64_t first = first_position(shape, arrival, expert, source);
#pragma unroll 1
    for (int i = lane; i < count; i += kWarp) {
      const int32_t slot = ptx::load_row4(order + i);
      const int32_t token = static_cast<int32_t>(view.slots.quotient(slot));
      const int64_t place = first + i;
      if (part == 0) {
        args.slots[expert * num_rows + place] = slot;
        args.src_info[expert * num_rows + place] = token;
        continue;
      }
      const char* row = memory + buffer.rows + token * view.layout.row_bytes + shape.hidden;
      const uint4 scales = ptx::load_row16(row + (part - 1) * kVectorBytes);
      store_scales(args, scales, expert, part - 1, place);
    }
  }
}

template <bool kFp8>
__device__ bool receive(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                        Arrival& arrival, uint64_t operation) {
  const LowLatencyView& view = args.view;
  const Senders& senders = arrival.senders;
  if (!wait_for_senders(
          view, buffer.counts, operation, kPhaseDispatchReady, args.waiting_stats, arrival.senders,
          [&](int i) { return view.ranks.remainder(i, view.ranks.quotient(i)); },
          [&](int i, int count) { arrival.count[i] = count; })) {
    return false;
  }
  int most = 0;
  for (int i = 0; i < view.shape.num_ranks; ++i) most = max(most, senders.tokens[i]);
  const int total = most * view.shape.num_ranks * args.row_shape.pieces;
  int u = first_unit();
  Incoming next = look_up(args, senders, buffer, u);
#pragma unroll 1
  for (; u < total; u += unit_step()) {
    const Incoming now = next;
    next = look_up(args, senders, buffer, u + unit_step());
    pack_piece(args, arrival, now, buffer, threadIdx.x % kWarp);
  }
  label_rows<kFp8>(args, arrival, buffer);
  if (blockIdx.x == gridDim.x - 1) describe(args, arrival);
  return true;
}

template <bool kFp8>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    low_latency_dispatch_kernel(const __grid_constant__ LowLatencyDispatchArgs args) {
  __shared__ Routing routing;
  __shared__ Arrival arrival;
  const LowLatencyView& view = args.view;
  const bool sends = (view.parts & kSend) != 0, receives = (view.parts & kReceive) != 0;
  if (sends) clear_counts(view.shape, routing);
  ptx::wait_for_stream();
  const uint64_t operation = operation_of(view);
  const bool aborted = is_aborted(view.comm);
  if (aborted && !sends) return;
  const LowLatencyBuffer& buffer = buffer_of(view, operation);
  if (sends && !send<kFp8>(args, buffer, routing, operation, aborted)) return;
  if (!receives) return;
  if (!receive<kFp8>(args, buffer, arrival, operation)) return;
  signal_received(view, operation);
}

}  // namespace

cudaError_t launch_low_latency_dispatch(const LowLatencyDispatchArgs& args,
                                        const LowLatencyLaunch& launch) {
  return args.fp8 != 0 ? launch.run(low_latency_dispatch_kernel<true>, args)
                       : launch.run(low_latency_dispatch_kernel<false>, args);
}

}  // namespace moe_ep
