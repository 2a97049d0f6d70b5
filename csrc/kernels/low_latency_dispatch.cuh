// Low-latency dispatch. Every rank stages its rows once, as they travel, with the routes of their
// tokens; a receiver reads each row that it wants once and writes it to all its experts, packed in
// order of source rank, then token. The place of a (token, expert) among its rank's rows for the
// expert is the number of them before it, so results repeat bit for bit.
#pragma once

#include "kernels/low_latency_stage.cuh"

namespace moe_ep {

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
template <typename Link>
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
  const char* routes = routes_of<Link>(view, buffer, in.source);
  const uint2 route =
      ptx::load_row8(reinterpret_cast<const Route*>(routes) + (in.token * slots + lane));
  in.route = {static_cast<int32_t>(route.x), static_cast<int32_t>(route.y)};
  return in;
}

// Where a piece goes, by lane: lane k has slot k.
struct Targets {
  uint32_t wanted;       // the slots
  int32_t local_expert;  // negative or too large: not here
  int64_t row;           // of the result, where the slot is wanted
};

__device__ __forceinline__ Targets find_targets(const LowLatencyDispatchArgs& args,
                                                const Arrival& arrival, const Incoming& in) {
  const LowLatencyView& view = args.view;
  const int local = static_cast<int>(view.ranks.quotient(view.shape.num_experts));
  const int expert = in.route.expert - view.comm.rank * local;
  const bool here = in.route.expert >= 0 && expert >= 0 && expert < local;
  int64_t row = 0;
  if (here) {
    const int64_t num_rows = static_cast<int64_t>(view.shape.num_ranks) * view.shape.max_tokens;
    row =
        expert * num_rows + in.route.index + first_position(view.shape, arrival, expert, in.source);
  }
  return {__ballot_sync(kAllLanes, here), expert, row};
}

// Writes the piece of the row at `source` to the rows of the slots in `wanted`.
__device__ __forceinline__ void pack_row(const LowLatencyDispatchArgs& args, const char* source,
                                         int piece_index, uint32_t wanted, int64_t to, int lane) {
  const RowShape& row_shape = args.row_shape;
  const int vectors = row_shape.vectors_of(piece_index);
  const int64_t offset = row_shape.offset_of(piece_index);
  Piece piece;
  load_piece(piece, source + offset, vectors, lane);
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

// Labels one row, whose slots in `wanted` are here.
template <bool kFp8>
__device__ __forceinline__ void label_row(const LowLatencyDispatchArgs& args, const Incoming& in,
                                          const char* source, const Targets& targets,
                                          uint32_t wanted, int lane) {
  const LowLatencyView& view = args.view;
  const int64_t num_rows = static_cast<int64_t>(view.shape.num_ranks) * view.shape.max_tokens;
  if ((wanted >> lane & 1) != 0) {
    args.slots[targets.row] = static_cast<int32_t>(in.token) * view.shape.num_slots + lane;
    args.src_info[targets.row] = static_cast<int32_t>(in.token);
  }
  if (!kFp8) return;
  const int num_parts = (view.shape.hidden / kFp8Block + 3) / 4;
#pragma unroll 1
  for (int part = lane; part - lane < num_parts; part += kWarp) {
    const uint4 scales =
        load_or_zero(source + view.shape.hidden + part * kVectorBytes, part < num_parts);
#pragma unroll 1
    for (uint32_t left = wanted; left != 0; left &= left - 1) {
      const int k = __ffs(left) - 1;
      const int64_t expert = __shfl_sync(kAllLanes, targets.local_expert, k);
      const int64_t row = __shfl_sync(kAllLanes, targets.row, k);
      if (part < num_parts) store_scales(args, scales, expert, part, row - expert * num_rows);
    }
  }
}

// A piece of a row of another host: by slots, each of its slots has a row of its own.
template <bool kFp8>
__device__ __forceinline__ void pack_far_piece(const LowLatencyDispatchArgs& args,
                                               const Incoming& in, const Targets& targets,
                                               const LowLatencyBuffer& buffer, int lane) {
  const LowLatencyView& view = args.view;
  const bool by_slots = view.hosts.by_slots != 0;
  const char* here = by_slots ? view.comm.peers[view.comm.rank] : stage_of(view, buffer, in.source);
  int64_t offset = in.token * view.layout.row_bytes;
  if (by_slots && (targets.wanted >> lane & 1) != 0) {
    offset = view.hosts.slot(view.layout, buffer, in.source, view.comm.rank, targets.local_expert,
                             in.route.index, view.shape.max_tokens);
  }
#pragma unroll 1
  for (uint32_t left = targets.wanted; left != 0;) {
    const uint32_t now = by_slots ? left & -left : left;
    const char* source = here + __shfl_sync(kAllLanes, offset, __ffs(now) - 1);
    pack_row(args, source, in.piece, now, targets.row, lane);
    if (in.piece == 0) label_row<kFp8>(args, in, source, targets, now, lane);
    left &= ~now;
  }
}

template <typename Link, bool kFp8>
__device__ __forceinline__ void pack_piece(const LowLatencyDispatchArgs& args,
                                           const Arrival& arrival, const Incoming& in,
                                           const LowLatencyBuffer& buffer, int lane) {
  const LowLatencyView& view = args.view;
  const Targets targets = find_targets(args, arrival, in);
  if (targets.wanted == 0) return;
  if constexpr (Link::kBorder) {
    if (!is_near<Link>(view, in.source)) {
      return pack_far_piece<kFp8>(args, in, targets, buffer, lane);
    }
  }
  const char* rows = view.comm.peers[in.source] + buffer.rows;
  pack_row(args, rows + in.token * view.layout.row_bytes, in.piece, targets.wanted, targets.row,
           lane);
}

// Writes what belongs to rows, 32 rows of a segment at a time, so that what lies side by side is
// written at once: where they come from, and their scales, four columns of them in one part. Rows
// of other hosts are labelled one by one (pack_far_piece): their order by expert stays on their
// host.
template <typename Link, bool kFp8>
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
    if (!is_near<Link>(view, source)) continue;
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

template <typename Link, bool kFp8>
__device__ bool receive(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                        Arrival& arrival, uint64_t operation) {
  const LowLatencyView& view = args.view;
  const Senders& senders = arrival.senders;
  const int local = static_cast<int>(view.ranks.quotient(view.shape.num_experts));
  const Awaited awaited{buffer.counts,
                        operation,
                        kPhaseDispatchReady,
                        true,
                        Link::kBorder && view.hosts.by_slots == 0,
                        args.waiting_stats,
                        nullptr};
  if (!wait_for_senders<Link>(view, awaited, arrival.senders, [&](int i, int count) {
        arrival.count[i % local * view.shape.num_ranks + i / local] = count;
      })) {
    return false;
  }
  int most = 0;
  for (int i = 0; i < view.shape.num_ranks; ++i) most = max(most, senders.tokens[i]);
  const int total = most * view.shape.num_ranks * args.row_shape.pieces;
  int u = first_unit();
  Incoming next = look_up<Link>(args, senders, buffer, u);
#pragma unroll 1
  for (; u < total; u += unit_step()) {
    const Incoming now = next;
    next = look_up<Link>(args, senders, buffer, u + unit_step());
    pack_piece<Link, kFp8>(args, arrival, now, buffer, threadIdx.x % kWarp);
  }
  label_rows<Link, kFp8>(args, arrival, buffer);
  if (blockIdx.x == gridDim.x - 1) describe(args, arrival);
  return true;
}

template <typename Link, bool kFp8>
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
  if (sends && !send<Link, kFp8>(args, buffer, routing, operation, aborted)) return;
  if (!receives) return;
  if (!receive<Link, kFp8>(args, buffer, arrival, operation)) return;
  signal_received<Link>(view, operation);
}

template <typename Link>
cudaError_t launch_dispatch(const LowLatencyDispatchArgs& args, const LowLatencyLaunch& launch) {
  return args.fp8 != 0 ? launch.run(low_latency_dispatch_kernel<Link, true>, args)
                       : launch.run(low_latency_dispatch_kernel<Link, false>, args);
}

}  // namespace moe_ep
