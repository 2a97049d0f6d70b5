// Routing of a low-latency dispatch: every (token, k) pair's place among its rank's rows for the
// expert, the number of such pairs before it.
#pragma once

#include "kernels/low_latency_signals.cuh"

namespace moe_ep {

constexpr int kPairs = 2048;  // (token, k) pairs that a block routes at a time

// A block's knowledge of the routing, in shared memory.
struct Routing {
  int32_t next[kMaxExperts + 1];   // next free place of each expert; [E] counts what is bad
  int32_t expert[kPairs];          // of the pairs at hand, -1: unused, E: bad
  int32_t index[kPairs];           // their places, -1: nothing is sent
  int32_t host_tokens[kMaxRanks];  // tokens that another host wants
};

// The tokens of a block: [begin, end), `step` of them routed at a time.
struct Share {
  int begin, end, step;
};

__device__ __forceinline__ Share share_of_block(const LowLatencyDispatchArgs& args) {
  const int per_block = static_cast<int>(ceil_div(args.num_tokens, gridDim.x));
  const int begin = min(static_cast<int>(blockIdx.x) * per_block, args.num_tokens);
  return {begin, min(begin + per_block, args.num_tokens), kPairs / args.view.shape.num_slots};
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

}  // namespace moe_ep
