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
    const int owner = expert / local, place = view.comm.rank * local + expert % local;
    const bool near = is_near<Link>(view, owner);
    ptx::store_relaxed_system(near ? word_at(view, owner, buffer.counts, place)
                                   : word_at(view, view.comm.rank, buffer.counts_out, expert),
                              ready_word(operation, view.tag, bad, count));
  }
  signal_senders<Link>(view, operation, gridDim.x, args.num_tokens, true);
  if constexpr (Link::kBorder) {
    put_counts<Link>(view, buffer);
    signal_puts<Link>(args, routing, bad, operation);
  }
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
  const int local = view.shape.num_experts / ranks;
  if (!wait_words<Link>(
          view, buffer.counts, operation, kPhaseDispatchReady, senders, true,
          [&](int i, int count) { arrival.begin[i % local * ranks + i / local] = count; })) {
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
