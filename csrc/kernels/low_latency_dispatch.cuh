// Low-latency dispatch. Every rank stages its rows once, as they travel, with the routes of their
// tokens; a receiver reads each row that it wants once and writes it to all its experts, packed in
// order of source rank, then token. The place of a (token, expert) among its rank's rows for the
// expert is the number of them before it, so results repeat bit for bit.
//
// Between hosts (a Link with a border) a block puts its rows and routes once it has staged them.
#pragma once

#include "device/quantize.cuh"
#include "kernels/low_latency_put.cuh"

namespace moe_ep {

// -- send -----------------------------------------------------------------------------------------

constexpr int kPairs = 2048;  // (token, k) pairs that a block routes at a time

// A block's knowledge of the routing, in shared memory.
struct Routing {
  int32_t next[kMaxExperts + 1];   // next free place of each expert; [E] counts what is bad
  int32_t expert[kPairs];          // of the pairs at hand, -1: unused, E: bad
  int32_t index[kPairs];           // their places, -1: nothing is sent
  int32_t host_tokens[kMaxRanks];  // tokens that another host wants
};

__device__ __forceinline__ Share share_of_block(const LowLatencyDispatchArgs& args) {
  const int per_block = static_cast<int>(ceil_div(args.num_tokens, gridDim.x));
  const int begin = min(static_cast<int>(blockIdx.x) * per_block, args.num_tokens);
  return {begin, min(begin + per_block, args.num_tokens), kPairs / args.view.shape.num_slots};
}

// What a warp loads of rows before it stores any: units of 32 vectors, one of each lane.
constexpr int kUnits = 8;
struct RowUnits {
  uint4 v[kUnits];
};

// Units u, u + kLowLatencyWarps, ... of the block's rows.
__device__ __forceinline__ void load_units(const LowLatencyDispatchArgs& args, const Share& share,
                                           int units_per_row, int u, RowUnits& out) {
  const int vectors = args.view.shape.hidden / kFp8Columns;
  const int total = (share.end - share.begin) * units_per_row;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = u + i * kLowLatencyWarps;
    const int vector = unit % units_per_row * kWarp + static_cast<int>(threadIdx.x) % kWarp;
    const int64_t token = share.begin + unit / units_per_row;
    out.v[i] = load_or_zero(args.x + (token * vectors + vector) * kVectorBytes,
                            unit < total && vector < vectors);
  }
}

template <bool kFp8>
__device__ __forceinline__ void stage_units(const LowLatencyDispatchArgs& args, const Share& share,
                                            const LowLatencyBuffer& buffer, int units_per_row,
                                            int u, const RowUnits& units) {
  const LowLatencyView& view = args.view;
  const int vectors = view.shape.hidden / kFp8Columns;
  const int total = (share.end - share.begin) * units_per_row;
  char* rows = view.comm.peers[view.comm.rank] + buffer.rows;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = u + i * kLowLatencyWarps;
    if (unit >= total) break;  // of the whole warp
    const int vector = unit % units_per_row * kWarp + static_cast<int>(threadIdx.x) % kWarp;
    char* row = rows + (share.begin + unit / units_per_row) * view.layout.row_bytes;
    if (!kFp8) {
      if (vector < vectors) ptx::store_row16(row + vector * kVectorBytes, units.v[i]);
      continue;
    }
    float f[kFp8Columns], scale;
    unpack(units.v[i], f, __nv_bfloat16());
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

// Gives `count` pairs their places, in order. One warp calls it.
__device__ __forceinline__ void assign_places(const LowLatencyShape& shape, Routing& routing,
                                              int count) {
  const uint32_t lane = threadIdx.x % kWarp, lower = (1u << lane) - 1;
  for (int begin = 0; begin < count; begin += kWarp) {
    const int i = begin + static_cast<int>(lane);
    const int expert = i < count ? routing.expert[i] : -1;
    const uint32_t same = __match_any_sync(kAllLanes, expert);
    const int index = expert < 0 ? -1 : routing.next[expert] + __popc(same & lower);
    __syncwarp();
    if (expert >= 0 && same >> lane == 1) routing.next[expert] = index + 1;  // its highest lane
    __syncwarp();
    const bool sent = index >= 0 && index < shape.max_tokens && expert < shape.num_experts;
    if (i < count) routing.index[i] = sent ? index : -1;
  }
}

// Publishes the routes of the block's tokens. Afterwards `routing.next` counts them and all tokens
// before them. All threads call it.
static __device__ void stage_routes(const LowLatencyDispatchArgs& args, const Share& share,
                                    const LowLatencyBuffer& buffer, Routing& routing) {
  const LowLatencyView& view = args.view;
  const int slots = view.shape.num_slots;
  Route* routes = reinterpret_cast<Route*>(view.comm.peers[view.comm.rank] + buffer.routes);
  for (int token = share.begin; token < share.end; token += share.step) {
    const int64_t first = static_cast<int64_t>(token) * slots;
    const int count = min(share.step, share.end - token) * slots;
    if (token != share.begin) {
      __syncthreads();
      load_experts(args, routing, first, count, false);
      __syncthreads();
    }
    if (threadIdx.x < kWarp) assign_places(view.shape, routing, count);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kLowLatencyThreads) {
      const int index = routing.index[i];
      routes[first + i] = {index < 0 ? -1 : routing.expert[i], index};
      args.index[first + i] = index;
    }
  }
}

// Tells the ranks of other hosts how many messages all blocks put for them: rows, and routes of
// each block with tokens. All threads of the block that counted all tokens call it.
template <typename Link>
__device__ void signal_puts(const LowLatencyDispatchArgs& args, Routing& routing,
                            uint64_t operation) {
  const LowLatencyView& view = args.view;
  const LowLatencyHosts& hosts = view.hosts;
  const int local = view.shape.num_experts / view.shape.num_ranks;
  const int per_block = max(static_cast<int>(ceil_div(args.num_tokens, gridDim.x)), 1);
  const int num_routes = static_cast<int>(ceil_div(args.num_tokens, per_block));
  const int which = static_cast<int>(operation & 1);
  if (hosts.by_slots != 0) {
    return signal_messages<Link>(view, operation, view.border->rank_messages[which], [&](int peer) {
      int count = num_routes;
      for (int i = peer * local; i < (peer + 1) * local; ++i) {
        count += min(routing.next[i], view.shape.max_tokens);
      }
      return count;
    });
  }
  if (threadIdx.x < hosts.num_hosts()) routing.host_tokens[threadIdx.x] = 0;
  __syncthreads();
  for (int token = threadIdx.x; token < args.num_tokens; token += kLowLatencyThreads) {
    uint64_t wanted = 0;
    for (int k = 0; k < view.shape.num_slots; ++k) {
      const int host = host_of_pair(args, static_cast<int64_t>(token) * view.shape.num_slots + k);
      if (host >= 0) wanted |= 1ull << host;
    }
    for (; wanted != 0; wanted &= wanted - 1) {
      atomicAdd(&routing.host_tokens[__ffsll(static_cast<long long>(wanted)) - 1], 1);
    }
  }
  __syncthreads();
  signal_messages<Link>(view, operation, view.border->host_messages[which], [&](int peer) {
    return num_routes + routing.host_tokens[hosts.host_of(peer)];
  });
}

// Tells every peer how many rows it gets for each of its experts. Called by the block that counted
// all tokens.
template <typename Link>
__device__ void signal_counts(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                              Routing& routing, uint64_t operation) {
  const LowLatencyView& view = args.view;
  const LowLatencyShape& shape = view.shape;
  const int local = shape.num_experts / shape.num_ranks;
  bool bad = view.comm.bad_input != 0 || routing.next[shape.num_experts] != 0;
  for (int i = threadIdx.x; i < shape.num_experts; i += kLowLatencyThreads) {
    bad = bad || routing.next[i] > shape.max_tokens;
  }
  bad = __syncthreads_or(bad) != 0;
  for (int i = threadIdx.x; i < shape.num_experts; i += kLowLatencyThreads) {
    // Starting with this rank's own experts: no two ranks begin with the same peer.
    const int expert = (i + view.comm.rank * local) % shape.num_experts;
    const int count = min(routing.next[expert], shape.max_tokens);
    const int place = expert % local * shape.num_ranks + view.comm.rank;
    set_word<Link>(view, expert / local, buffer.counts, place,
                   ready_word(operation, view.tag, bad, count));
  }
  signal_senders<Link>(view, operation, gridDim.x, args.num_tokens);
  if constexpr (Link::kBorder) signal_puts<Link>(args, routing, operation);
  if (bad && threadIdx.x == 0) view.comm.host->bad_peer = view.comm.rank + 1;
}

template <typename Link, bool kFp8>
__device__ bool send(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                     Routing& routing, uint64_t operation) {
  const LowLatencyView& view = args.view;
  const Share share = share_of_block(args);
  const int warp = threadIdx.x / kWarp;
  const int units = static_cast<int>(ceil_div(view.shape.hidden / kFp8Columns, kWarp));
  RowUnits row_units;
  load_units(args, share, units, warp, row_units);
  for (int i = threadIdx.x; i <= view.shape.num_experts; i += kLowLatencyThreads) {
    routing.next[i] = 0;
  }
  __syncthreads();
  const int at_first = min(share.step, share.end - share.begin) * view.shape.num_slots;
  const bool is_free = poll_buffer_free(view, operation);
  load_experts(args, routing, static_cast<int64_t>(share.begin) * view.shape.num_slots, at_first,
               true);
  if (__syncthreads_and(is_free) == 0) return false;
  constexpr int kStep = kUnits * kLowLatencyWarps;
  for (int u = warp; u < (share.end - share.begin) * units; u += kStep) {
    if (u != warp) load_units(args, share, units, u, row_units);
    stage_units<kFp8>(args, share, buffer, units, u, row_units);
  }
  stage_routes(args, share, buffer, routing);
  // The last block has counted all tokens.
  if (blockIdx.x == gridDim.x - 1) signal_counts<Link>(args, buffer, routing, operation);
  signal_block<Link>(view, operation);
  if constexpr (Link::kBorder) put_share<Link, kFp8>(args, share, buffer);
  return true;
}

// -- receive --------------------------------------------------------------------------------------

// What a block knows of what arrives, in shared memory.
struct Arrival {
  // Rows of segment (local expert, source rank), then where they begin.
  int32_t begin[kMaxExperts + 1];
  Senders senders;
};

// Block 0 writes what describes the result.
static __device__ void describe(const LowLatencyDispatchArgs& args, const int32_t* begin) {
  const LowLatencyShape& shape = args.view.shape;
  const int ranks = shape.num_ranks;
  for (int i = threadIdx.x; i < shape.num_experts; i += kLowLatencyThreads) {
    const int64_t first = begin[i] - begin[i / ranks * ranks];
    args.layout_range[i] = first << 32 | (begin[i + 1] - begin[i]);
  }
  for (int e = threadIdx.x; e < shape.num_experts / ranks; e += kLowLatencyThreads) {
    const int count = begin[(e + 1) * ranks] - begin[e * ranks];
    args.recv_count[e] = count;
    if (args.expert_stats != nullptr) args.expert_stats[e] += count;
  }
}

// A piece of a staged row, and for lane k the place of slot k's row in the result.
struct Incoming {
  int64_t token;
  int32_t source, piece;
  int32_t expert;    // local, -1: not here
  int32_t position;  // within the expert
};

// The number of units is pieces * R * (most tokens of a source); beyond it nothing is here.
template <typename Link>
__device__ __forceinline__ Incoming look_up(const LowLatencyDispatchArgs& args,
                                            const Arrival& arrival, const LowLatencyBuffer& buffer,
                                            int64_t u) {
  const LowLatencyView& view = args.view;
  const LowLatencyShape& shape = view.shape;
  const int lane = threadIdx.x % kWarp, ranks = shape.num_ranks;
  const int local = shape.num_experts / ranks;
  const int64_t row = u / args.row_shape.pieces;
  Incoming in{row / ranks, static_cast<int32_t>((view.comm.rank + row) % ranks),
              static_cast<int32_t>(u % args.row_shape.pieces), -1, 0};
  if (lane >= shape.num_slots || in.token >= arrival.senders.tokens[in.source]) return in;
  const char* routes = routes_of<Link>(view, buffer, in.source);
  const uint2 route =
      ptx::load_row8(reinterpret_cast<const Route*>(routes) + (in.token * shape.num_slots + lane));
  const int expert = static_cast<int>(route.x) - view.comm.rank * local;
  if (expert < 0 || expert >= local) return in;
  in.expert = expert;
  in.position = arrival.begin[expert * ranks + in.source] - arrival.begin[expert * ranks] +
                static_cast<int>(route.y);
  return in;
}

// Lane i's scale (or word of four scales) of the piece, and how many the piece has.
struct PieceScales {
  uint32_t bits;
  int first, count;
};

__device__ __forceinline__ PieceScales load_scales(const LowLatencyDispatchArgs& args,
                                                   const char* row, int first_vector, int vectors,
                                                   int lane) {
  const uint32_t* scales = reinterpret_cast<const uint32_t*>(row + args.view.shape.hidden);
  constexpr int kVectorsPerScale = kFp8Block / kVectorBytes;
  if (args.pack_scales == 0) {
    const int first = first_vector / kVectorsPerScale, count = vectors / kVectorsPerScale;
    return {lane < count ? scales[first + lane] : 0, first, count};
  }
  const int first = first_vector / (4 * kVectorsPerScale);
  const int count = vectors / (4 * kVectorsPerScale);
  uint32_t word = 0;
  if (lane < count) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // of a power of two, the exponent is all there is
      word |= (scales[4 * (first + lane) + j] >> 23 & 0xffu) << (8 * j);
    }
  }
  return {word, first, count};
}

// Writes the row at `source` to the slots in `wanted` of the token. All lanes call it.
template <bool kFp8>
__device__ __forceinline__ void pack_row(const LowLatencyDispatchArgs& args, const Incoming& in,
                                         const char* source, uint32_t wanted, int lane) {
  const LowLatencyView& view = args.view;
  const RowShape& row_shape = args.row_shape;
  const int64_t num_rows = static_cast<int64_t>(view.shape.num_ranks) * view.shape.max_tokens;
  const int vectors = row_shape.vectors_of(in.piece);
  const int64_t offset = row_shape.offset_of(in.piece);
  Piece piece;
  load_piece(piece, source + offset, vectors, lane);
  PieceScales scales{};
  if (kFp8) {
    scales = load_scales(args, source, static_cast<int>(offset) / kVectorBytes, vectors, lane);
  }
  if (in.piece == 0 && (wanted >> lane & 1) != 0) {
    const int64_t to = in.expert * num_rows + in.position;
    args.slots[to] = static_cast<int32_t>(in.token) * view.shape.num_slots + lane;
    args.src_info[to] = static_cast<int32_t>(in.token);
  }
  const int scales_per_row = view.shape.hidden / kFp8Block / (args.pack_scales != 0 ? 4 : 1);
#pragma unroll 1
  for (; wanted != 0; wanted &= wanted - 1) {
    const int k = __ffs(wanted) - 1;
    const int64_t expert = __shfl_sync(kAllLanes, in.expert, k);
    const int64_t position = __shfl_sync(kAllLanes, in.position, k);
    char* row = args.rows + (expert * num_rows + position) * row_shape.row_bytes;
    store_piece(piece, row + offset, vectors, lane);
    if (kFp8 && lane < scales.count) {
      const int64_t column = expert * scales_per_row + scales.first + lane;
      static_cast<uint32_t*>(args.scales)[column * num_rows + position] = scales.bits;
    }
  }
}

template <typename Link, bool kFp8>
__device__ __forceinline__ void pack_piece(const LowLatencyDispatchArgs& args,
                                           const Arrival& arrival, const Incoming& in,
                                           const LowLatencyBuffer& buffer, int lane) {
  const LowLatencyView& view = args.view;
  uint32_t wanted = __ballot_sync(kAllLanes, in.expert >= 0);
  if (wanted == 0) return;
  const char* rows = nullptr;
  if constexpr (Link::kBorder) {
    if (view.hosts.by_slots != 0 && !is_near<Link>(view, in.source)) {
      // Each slot has a row of its own.
      const int ranks = view.shape.num_ranks, first = max(in.expert, 0) * ranks;
      const int index = in.position - (arrival.begin[first + in.source] - arrival.begin[first]);
      const int64_t offset =
          view.hosts.slot(view.layout, buffer, in.source, view.comm.rank, max(in.expert, 0),
                          max(index, 0), view.shape.max_tokens);
#pragma unroll 1
      for (; wanted != 0; wanted &= wanted - 1) {
        const int64_t at = __shfl_sync(kAllLanes, offset, __ffs(wanted) - 1);
        pack_row<kFp8>(args, in, view.comm.peers[view.comm.rank] + at, wanted & -wanted, lane);
      }
      return;
    }
    rows = stage_of(view, buffer, in.source);
  } else {
    rows = view.comm.peers[in.source] + buffer.rows;
  }
  pack_row<kFp8>(args, in, rows + in.token * view.layout.row_bytes, wanted, lane);
}

template <typename Link, bool kFp8>
__device__ bool receive(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                        Arrival& arrival, uint64_t operation) {
  const LowLatencyView& view = args.view;
  const int ranks = view.shape.num_ranks;
  Senders& senders = arrival.senders;
  senders.waited.begin();
  if (!wait_words(
          view, buffer.counts, operation, kPhaseDispatchReady, senders,
          [ranks](int i) { return i % ranks; },
          [&](int i, int count) { arrival.begin[i] = count; })) {
    return false;
  }
  block_exclusive_scan<kLowLatencyThreads>(arrival.begin, view.shape.num_experts);
  if (blockIdx.x == 0) describe(args, arrival.begin);
  if (!wait_blocks(view, operation, kPhaseDispatchReady, senders)) return false;
  if constexpr (Link::kBorder) {
    const bool at_host = view.hosts.by_slots == 0;
    if (!wait_messages(view, operation, kPhaseDispatchReady, senders, at_host)) return false;
  }
  senders.waited.add_to(args.waiting_stats, ranks);
  int most = 0;
  for (int i = 0; i < ranks; ++i) most = max(most, senders.tokens[i]);
  const int64_t total = static_cast<int64_t>(most) * ranks * args.row_shape.pieces;
  int64_t u = first_unit();
  Incoming next = look_up<Link>(args, arrival, buffer, u);
  for (; u < total; u += unit_step()) {
    const Incoming now = next;
    next = look_up<Link>(args, arrival, buffer, u + unit_step());
    pack_piece<Link, kFp8>(args, arrival, now, buffer, threadIdx.x % kWarp);
  }
  return true;
}

template <typename Link, bool kFp8>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    low_latency_dispatch_kernel(const __grid_constant__ LowLatencyDispatchArgs args) {
  __shared__ union {
    Routing routing;
    Arrival arrival;
  } shared;
  const LowLatencyView& view = args.view;
  ptx::wait_for_stream();
  const uint64_t operation = operation_of(view);
  if (is_aborted(view.comm)) return;
  const LowLatencyBuffer& buffer = buffer_of(view, operation);
  if ((view.parts & kSend) != 0 && !send<Link, kFp8>(args, buffer, shared.routing, operation)) {
    return;
  }
  __syncthreads();
  if ((view.parts & kReceive) != 0 &&
      !receive<Link, kFp8>(args, buffer, shared.arrival, operation)) {
    return;
  }
  finish<Link>(view, operation);
}

template <typename Link>
cudaError_t launch_dispatch(const LowLatencyDispatchArgs& args, const LowLatencyLaunch& launch) {
  return args.fp8 != 0 ? launch.run(low_latency_dispatch_kernel<Link, true>, args)
                       : launch.run(low_latency_dispatch_kernel<Link, false>, args);
}

}  // namespace moe_ep
