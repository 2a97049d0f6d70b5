// What the kernels of low-latency mode share: which buffer an operation uses, and waits for peers.
//
// A send may write to a buffer once the peers have received its last operation, two operations ago;
// it waits for that at its start. No send waits for a receive of the same or a later operation, so
// that hooks may come in any order.
#pragma once

#include "device/block_scan.cuh"
#include "device/grid.cuh"
#include "device/rows.cuh"
#include "kernels/low_latency.h"

namespace moe_ep {

constexpr int kLowLatencyWarps = kLowLatencyThreads / kWarp;

// Warps of all blocks share units 0, 1, ... of work.
__device__ __forceinline__ int64_t first_unit() {
  return static_cast<int64_t>(blockIdx.x) * kLowLatencyWarps + threadIdx.x / kWarp;
}
__device__ __forceinline__ int64_t unit_step() {
  return static_cast<int64_t>(gridDim.x) * kLowLatencyWarps;
}

__device__ __forceinline__ uint64_t operation_of(const LowLatencyView& view) {
  return (view.parts & kSend) != 0 ? view.comm.control->operation + 1 : *view.ticket;
}

__device__ __forceinline__ const LowLatencyBuffer& buffer_of(const LowLatencyView& view,
                                                             uint64_t operation) {
  return view.layout.buffers[operation & 1];
}

__device__ __forceinline__ uint64_t* word_at(const LowLatencyView& view, int owner, int64_t words,
                                             int index) {
  return reinterpret_cast<uint64_t*>(view.comm.peers[owner] + words) + index;
}

__device__ __forceinline__ int load_expert(const void* topk_idx, bool is_64_bit, int64_t slot) {
  // Truncating could make a valid index of a bad one.
  const int64_t expert = is_64_bit ? static_cast<const int64_t*>(topk_idx)[slot]
                                   : static_cast<const int32_t*>(topk_idx)[slot];
  return expert < -1 || expert >= kMaxExperts ? kMaxExperts : static_cast<int>(expert);
}

// Waits, before `operation`, until every peer has received the earlier operation `last`. All
// threads of the block call it and get the same answer, after a barrier. False: the kernel is to
// end.
__device__ __forceinline__ bool wait_received(const LowLatencyView& view, uint64_t operation,
                                              uint64_t last) {
  const CommView& comm = view.comm;
  int passed = 1;
  if (threadIdx.x < comm.num_ranks && last > 0) {
    const int peer = (comm.rank + threadIdx.x) % comm.num_ranks;
    const uint64_t* word = word_at(view, comm.rank, buffer_of(view, last).received, peer);
    uint64_t seen = ptx::load_acquire_system(word);
    for (Deadline deadline; seen < last; seen = ptx::load_acquire_system(word)) {
      if (!deadline.expired(comm, comm.timeout_ns)) continue;
      seen = ptx::load_acquire_system(word);  // the last look
      if (seen >= last) break;
      record_fault(comm, peer, kPhaseBufferFree, operation, last, seen);
      passed = 0;
      break;
    }
  }
  return __syncthreads_and(passed) != 0;
}

// Waits until the buffer of an operation to be sent is free.
__device__ __forceinline__ bool wait_buffer_free(const LowLatencyView& view, uint64_t operation) {
  return wait_received(view, operation, operation > 2 ? operation - 2 : 0);
}

// As arrive_last, where nothing but the reading of peers' rows must have happened before a signal.
__device__ __forceinline__ bool readers_arrive_last(uint32_t* counter) {
  __shared__ uint32_t is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = ptx::add_acq_rel_device(counter, 1) == gridDim.x - 1;
    if (is_last != 0) *counter = 0;  // for the next kernel
  }
  __syncthreads();
  return is_last != 0;
}

// Ends a launch: after a send the next operation may begin, after a receive the peers are told that
// their rows have been read. Called by all threads of every block; true in the last block.
__device__ __forceinline__ bool finish(const LowLatencyView& view, uint64_t operation) {
  const CommView& comm = view.comm;
  if (!readers_arrive_last(&comm.control->arrived_end)) return false;
  if (threadIdx.x == 0 && (view.parts & kSend) != 0) {
    comm.control->operation = operation;
    if ((view.parts & kReceive) == 0) *view.ticket = operation;
  }
  if (threadIdx.x < comm.num_ranks && (view.parts & kReceive) != 0) {
    const int peer = (comm.rank + threadIdx.x) % comm.num_ranks;
    const int64_t words = buffer_of(view, operation).received;
    ptx::store_release_system(word_at(view, peer, words, comm.rank), operation);
  }
  return true;
}

// How long a block has waited for each rank, in shared memory.
struct Waited {
  uint64_t start;
  unsigned long long ns[kMaxRanks];

  __device__ __forceinline__ void begin() {
    if (threadIdx.x < kMaxRanks) ns[threadIdx.x] = 0;
    if (threadIdx.x == 0) start = ptx::global_nanoseconds();
    __syncthreads();
  }
  __device__ __forceinline__ void add_to(int64_t* waiting_stats, int num_ranks) const {
    if (waiting_stats == nullptr || blockIdx.x != 0 || threadIdx.x >= num_ranks) return;
    waiting_stats[threadIdx.x] += static_cast<int64_t>(ns[threadIdx.x]);
  }
};

// Waits for `count` ready words beginning at `words`, word i written by rank peer_of(i), and calls
// store(i, count) for each. All threads of the block call it and get the same answer, after a
// barrier. False: the kernel is to end.
template <typename PeerOf, typename Store>
__device__ __forceinline__ bool wait_words(const LowLatencyView& view, int64_t words, int count,
                                           uint64_t operation, Phase phase, Waited& waited,
                                           PeerOf peer_of, Store store) {
  const CommView& comm = view.comm;
  const uint32_t number = static_cast<uint32_t>(operation);
  int passed = 1;
  for (int i = threadIdx.x; i < count && passed != 0; i += kLowLatencyThreads) {
    const uint64_t* word = word_at(view, comm.rank, words, i);
    const int peer = peer_of(i);
    uint64_t seen = ptx::load_acquire_system(word);
    for (Deadline deadline; word_operation(seen) != number;) {
      const bool expired = deadline.expired(comm, comm.timeout_ns);
      seen = ptx::load_acquire_system(word);  // after expiry: the last look
      if (expired && word_operation(seen) != number) break;
    }
    if (word_operation(seen) != number || word_tag(seen) != view.tag) {
      record_fault(comm, peer, phase, operation, ready_word(operation, view.tag, false, 0), seen);
      passed = 0;
      break;
    }
    if (word_is_bad(seen)) comm.host->bad_peer = peer + 1;
    atomicMax(&waited.ns[peer], ptx::global_nanoseconds() - waited.start);
    store(i, word_count(seen));
  }
  return __syncthreads_and(passed) != 0;
}

}  // namespace moe_ep
