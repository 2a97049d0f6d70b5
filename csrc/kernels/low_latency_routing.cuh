// Routing of a low-latency dispatch: every (token, k) pair's place among its rank's rows for the
// expert, the number of such pairs before it.
#pragma once

#include "kernels/low_latency_signals.cuh"

namespace moe_ep {

constexpr int kPairs = 2048;  // (token, k) pairs that a block routes at a time

// A block's knowledge of the routing, in shared memory.
struct Routing {
  int32_t next[kMaxExperts + 1];  // next free place of each expert; [E] counts what is bad
  int32_t expert[kPairs];         // of the pairs at hand, -1: unused, E: bad
  // Between hosts.
  int32_t host_tokens[kMaxRanks];  // tokens that another host wants
  bool is_bad;                     // what the peers are told
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

__device__ __forceinline__ void clear_counts(const LowLatencyShape& shape, Routing& routing) {
  for (int i = threadIdx.x; i <= shape.num_experts; i += kLowLatencyThreads) routing.next[i] = 0;
  __syncthreads();
}

}  // namespace moe_ep
