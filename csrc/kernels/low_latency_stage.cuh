// The sending half of a low-latency dispatch: rows as they travel and the routes of their tokens,
// where peers can read them.
#pragma once

#include "device/quantize.cuh"
#include "kernels/low_latency_signals.cuh"

namespace moe_ep {

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
  // The last block has counted all tokens.
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x < kWarp) {
    signal_counts(args, buffer, routing, operation);
  }
  while (units.at.token < share.end) {
    stage_units<kFp8>(args, share, buffer, units, values);
    if (units.at.token < share.end) load_units(args, share, units, values);
  }
  signal_block(view, buffer.blocks, operation);
  count_operation(view, operation);
  return true;
}

}  // namespace moe_ep
