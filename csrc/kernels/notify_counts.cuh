// First half of notify: counting the slots of this rank, and the exchange of counts.
#pragma once

#include "device/grid.cuh"
#include "kernels/notify.h"

namespace moe_ep {

constexpr int kNotifyThreads = 512;
constexpr int kNotifyWarps = kNotifyThreads / 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

// Columns a rank counts for itself: E experts, R rank rows, R items per destination, bad indices.
__host__ __device__ constexpr int own_columns(int num_experts, int num_ranks) {
  return num_experts + 2 * num_ranks + 1;
}

// What a block knows once all counts have arrived. All arrays in shared memory.
struct Offsets {
  int32_t* base;  // [own columns] where this rank's share of each column begins
  int32_t* scan;  // [E+1] rows before each expert, over all ranks, padding included
};

struct Range {
  int64_t begin, end;  // tokens
};

__device__ inline Range warp_range(int64_t num_tokens) {
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * kNotifyWarps;
  const int64_t per_warp = ceil_div(num_tokens, num_warps);
  const int64_t begin =
      min64((blockIdx.x * kNotifyWarps + threadIdx.x / 32) * per_warp, num_tokens);
  return {begin, min64(begin + per_warp, num_tokens)};
}

// The expert of a slot, -1 where it is unused, -2 where the index is bad.
__device__ __forceinline__ int load_expert(const NotifyArgs& args, int64_t slot) {
  const int64_t expert = args.topk_is_64_bit ? static_cast<const int64_t*>(args.topk_idx)[slot]
                                             : static_cast<const int32_t*>(args.topk_idx)[slot];
  return expert < -1 || expert >= args.comm.num_experts ? -2 : static_cast<int>(expert);
}

// One slot among the slots of its token.
struct SlotInfo {
  int expert, destination;  // negative: no row
  bool first;               // the first of its token for this destination
  int position;             // destinations of the token below this one
  int num_destinations;     // of the token
  int same, same_before;    // slots of the token for this destination: all, with lower k
  int order;                // of them, those with a lower (expert, k)
};

__device__ __forceinline__ SlotInfo inspect_slot(const NotifyArgs& args, int64_t slot) {
  const int num_slots = args.plan.num_slots;
  const int local = args.comm.num_experts / args.comm.num_ranks;
  const int64_t token_slot = slot / num_slots * num_slots;
  const int k = static_cast<int>(slot - token_slot);
  SlotInfo info{};
  info.expert = load_expert(args, slot);
  info.destination = info.expert < 0 ? -1 : info.expert / local;
  uint64_t all = 0, before = 0;
  for (int i = 0; i < num_slots; ++i) {
    const int expert = load_expert(args, token_slot + i);
    if (expert < 0) continue;
    const int destination = expert / local;
    all |= 1ull << destination;
    if (i < k) before |= 1ull << destination;
    if (destination != info.destination) continue;
    ++info.same;
    info.same_before += i < k;
    info.order += expert < info.expert || (expert == info.expert && i < k);
  }
  info.num_destinations = __popcll(all);
  if (info.destination >= 0) {
    info.first = (before >> info.destination & 1) == 0;
    info.position = __popcll(all & ((1ull << info.destination) - 1));
  }
  return info;
}

// Fills counters[warp][column] with this block's counts, scanned over its warps, and writes the
// block's totals to block_counts.
__device__ inline void count_slots(const NotifyArgs& args, int32_t* counters,
                                   int32_t* block_counts) {
  const int experts = args.comm.num_experts, ranks = args.comm.num_ranks;
  const int columns = own_columns(experts, ranks);
  for (int i = threadIdx.x; i < kNotifyWarps * columns; i += kNotifyThreads) counters[i] = 0;
  __syncthreads();
  int32_t* mine = counters + threadIdx.x / 32 * columns;
  const Range range = warp_range(args.plan.num_tokens);
  const int64_t end = range.end * args.plan.num_slots;
  for (int64_t i = range.begin * args.plan.num_slots + threadIdx.x % 32; i < end; i += 32) {
    const SlotInfo info = inspect_slot(args, i);
    if (info.expert == -2) atomicAdd(&mine[columns - 1], 1);
    if (info.expert < 0) continue;
    atomicAdd(&mine[info.expert], 1);
    atomicAdd(&mine[experts + ranks + info.destination], 1);
    if (info.first) atomicAdd(&mine[experts + info.destination], 1);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < columns; c += kNotifyThreads) {
    int32_t running = 0;
    for (int w = 0; w < kNotifyWarps; ++w) {
      const int32_t value = counters[w * columns + c];
      counters[w * columns + c] = running;
      running += value;
    }
    block_counts[static_cast<int64_t>(blockIdx.x) * columns + c] = running;
  }
}

__device__ __forceinline__ void publish_count(const CommView& comm, uint64_t operation, int column,
                                              uint32_t value) {
  const int64_t width = count_columns(comm.num_experts, comm.num_ranks);
  const uint64_t word = operation << 32 | value;
  for (int i = 0; i < comm.num_ranks; ++i) {
    const int peer = (comm.rank + i) % comm.num_ranks;
    uint64_t* counts = reinterpret_cast<uint64_t*>(comm.peers[peer] + comm.layout.counts);
    ptx::store_relaxed_system(counts + comm.rank * width + column, word);
  }
}

// Scans the block counts over blocks and sends the totals to every rank.
__device__ inline void send_counts(const NotifyArgs& args, uint64_t operation,
                                   int32_t* block_counts) {
  const CommView& comm = args.comm;
  const int experts = comm.num_experts, ranks = comm.num_ranks;
  const int columns = own_columns(experts, ranks);
  const int step = gridDim.x * kNotifyThreads;
  for (int c = blockIdx.x * kNotifyThreads + threadIdx.x; c <= columns; c += step) {
    if (c == columns) {
      publish_count(comm, operation, num_tokens_column(experts, ranks),
                    static_cast<uint32_t>(args.plan.num_tokens));
      continue;
    }
    constexpr int kLoads = 8;  // at once
    int32_t running = 0;
    for (int first = 0; first < gridDim.x; first += kLoads) {
      int32_t values[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const bool inside = first + i < gridDim.x;
        values[i] = inside ? block_counts[(first + i) * columns + c] : 0;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + i < gridDim.x) block_counts[(first + i) * columns + c] = running;
        running += values[i];
      }
    }
    if (c < experts + ranks) publish_count(comm, operation, c, running);
    if (c == columns - 1) {
      publish_count(comm, operation, bad_index_column(experts, ranks), running + comm.bad_input);
    }
  }
}

// Waits for the counts of every rank and copies them to `matrix` [R][count_columns].
__device__ inline void receive_counts(const CommView& comm, uint64_t operation, int32_t* matrix) {
  const int width = count_columns(comm.num_experts, comm.num_ranks);
  const uint64_t* counts =
      reinterpret_cast<const uint64_t*>(comm.peers[comm.rank] + comm.layout.counts);
  const uint32_t tag = static_cast<uint32_t>(operation);
  const int step = gridDim.x * kNotifyThreads;
  for (int i = blockIdx.x * kNotifyThreads + threadIdx.x; i < comm.num_ranks * width; i += step) {
    uint64_t word = ptx::load_relaxed_system(counts + i);
    for (Deadline deadline; word >> 32 != tag; word = ptx::load_relaxed_system(counts + i)) {
      if (!deadline.expired(comm, comm.timeout_ns)) continue;
      word = ptx::load_relaxed_system(counts + i);  // the last look
      if (word >> 32 == tag) break;
      record_fault(comm, i / width, Phase::kCounts, operation, operation << 32, word);
      return;
    }
    matrix[i] = static_cast<int32_t>(word);
  }
}

}  // namespace moe_ep
