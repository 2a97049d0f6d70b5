// The sending half of a low-latency dispatch: rows as they travel and the routes of their tokens,
// where peers can read them. Between hosts (a Link with a border) a block puts its rows and routes
// once it has staged them.
#pragma once

#include "device/quantize.cuh"
#include "kernels/low_latency_put.cuh"

namespace moe_ep {

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

// Tells every peer how many rows it gets for each of its experts; those of other hosts get it from
// `counts_out`. Called by the first warp of the block that counted all tokens. Returns whether the
// input is bad.
template <typename Link>
__device__ __forceinline__ bool signal_counts(const LowLatencyDispatchArgs& args,
                                              const LowLatencyBuffer& buffer,
                                              const Routing& routing, uint64_t operation) {
  const LowLatencyView& view = args.view;
  const LowLatencyShape& shape = view.shape;
  const int local = static_cast<int>(view.ranks.quotient(shape.num_experts));
  bool bad = view.comm.bad_input != 0 || routing.next[shape.num_experts] != 0;
  for (int i = threadIdx.x; i < shape.num_experts; i += kWarp) {
    bad = bad || routing.next[i] > shape.max_tokens;
  }
  bad = __any_sync(kAllLanes, bad) != 0;
  for (int i = threadIdx.x; i < shape.num_experts; i += kWarp) {
    // Starting with this rank's own experts: no two ranks begin with the same peer.
    const int shifted = i + view.comm.rank * local;
    const int expert = shifted < shape.num_experts ? shifted : shifted - shape.num_experts;
    const int count = min(routing.next[expert], shape.max_tokens);
    const int owner = expert / local, place = view.comm.rank * local + expert % local;
    const bool near = is_near<Link>(view, owner);
    ptx::store_relaxed_system(near ? word_at(view, owner, buffer.counts, place)
                                   : word_at(view, view.comm.rank, buffer.counts_out, expert),
                              ready_word(operation, view.tag, bad, count));
  }
  signal_senders<Link>(view, operation, gridDim.x, args.num_tokens, true);
  if (bad && threadIdx.x == 0) view.comm.host->bad_peer = view.comm.rank + 1;
  return bad;
}

// After clear_counts. What needs no peer comes first.
template <typename Link, bool kFp8>
__device__ __forceinline__ bool send(const LowLatencyDispatchArgs& args,
                                     const LowLatencyBuffer& buffer, Routing& routing,
                                     uint64_t operation, bool aborted) {
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
  if (blockIdx.x == gridDim.x - 1) {  // it has counted all tokens
    if (threadIdx.x < kWarp) {
      const bool bad = signal_counts<Link>(args, buffer, routing, operation);
      if (Link::kBorder && threadIdx.x == 0) routing.is_bad = bad;
    }
    if constexpr (Link::kBorder) {
      put_counts<Link>(view, buffer);
      signal_puts<Link>(args, routing, operation);
    }
  }
  while (units.at.token < share.end) {
    stage_units<kFp8>(args, share, buffer, units, values);
    if (units.at.token < share.end) load_units(args, share, units, values);
  }
  signal_block<Link>(view, buffer.blocks, operation);
  if constexpr (Link::kBorder) put_share<Link>(args, share, buffer);
  count_operation(view, operation);
  return true;
}

}  // namespace moe_ep
