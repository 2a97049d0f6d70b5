// What the kernels of low-latency mode share: which buffer an operation uses, waits for peers, and
// the order in which received rows are packed.
//
// A send may write to a peer once that peer has received the last operation of the same buffer, two
// operations ago; it waits for that at its start. No kernel waits for another block of its own grid
// and none waits for a later operation, so that hooks may come in any order.
#pragma once

#include "device/block_scan.cuh"
#include "device/grid.cuh"
#include "device/rows.cuh"
#include "kernels/low_latency.h"

namespace moe_ep {

constexpr int kLowLatencyThreads = 512;
constexpr int kLowLatencyWarps = kLowLatencyThreads / kWarp;

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

// Waits until every peer has read what this buffer held before. All threads of the block call it
// and get the same answer. False: the kernel is to end.
__device__ __forceinline__ bool wait_buffer_free(const LowLatencyView& view, uint64_t operation) {
  const CommView& comm = view.comm;
  int passed = 1;
  if (threadIdx.x < comm.num_ranks && operation > 2) {
    const int peer = (comm.rank + threadIdx.x) % comm.num_ranks;
    const uint64_t* word = word_at(view, comm.rank, buffer_of(view, operation).received, peer);
    uint64_t seen = ptx::load_acquire_system(word);
    for (Deadline deadline; seen + 2 < operation; seen = ptx::load_acquire_system(word)) {
      if (!deadline.expired(comm, comm.timeout_ns)) continue;
      seen = ptx::load_acquire_system(word);  // the last look
      if (seen + 2 >= operation) break;
      record_fault(comm, peer, kPhaseBufferFree, operation, operation - 2, seen);
      passed = 0;
      break;
    }
  }
  return __syncthreads_and(passed) != 0;
}

// Tells every peer that its rows have been read. Called by all threads of every block.
__device__ __forceinline__ void finish_receive(const LowLatencyView& view, uint64_t operation) {
  const CommView& comm = view.comm;
  if (!arrive_last(&comm.control->arrived_end) || threadIdx.x >= comm.num_ranks) return;
  const int peer = (comm.rank + threadIdx.x) % comm.num_ranks;
  const int64_t words = buffer_of(view, operation).received;
  ptx::store_release_system(word_at(view, peer, words, comm.rank), operation);
}

// Called by one thread of the last block to arrive: the next operation may begin.
__device__ __forceinline__ void finish_send(const LowLatencyView& view, uint64_t operation,
                                            uint64_t* ticket) {
  view.comm.control->operation = operation;
  *ticket = operation;
}

// How long a block has waited for each rank, in shared memory.
struct Waited {
  uint64_t start;
  unsigned long long ns[kMaxRanks];
};

// Waits for `count` ready words beginning at `words`, word i written by rank i % R, and calls
// store(i, rows) for each. All threads of the block call it and get the same answer, after a
// barrier. False: the kernel is to end.
template <typename Store>
__device__ __forceinline__ bool wait_words(const LowLatencyView& view, int64_t words, int count,
                                           uint64_t operation, Phase phase, Waited& waited,
                                           Store store) {
  const CommView& comm = view.comm;
  if (threadIdx.x < kMaxRanks) waited.ns[threadIdx.x] = 0;
  if (threadIdx.x == 0) waited.start = ptx::global_nanoseconds();
  __syncthreads();
  const uint32_t number = static_cast<uint32_t>(operation);
  int passed = 1;
  for (int i = threadIdx.x; i < count && passed != 0; i += kLowLatencyThreads) {
    const uint64_t* word = word_at(view, comm.rank, words, i);
    const int peer = i % comm.num_ranks;
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

__device__ __forceinline__ void add_waiting(const CommView& comm, const Waited& waited,
                                            int64_t* waiting_stats) {
  if (waiting_stats == nullptr || blockIdx.x != 0 || threadIdx.x >= comm.num_ranks) return;
  waiting_stats[threadIdx.x] += static_cast<int64_t>(waited.ns[threadIdx.x]);
}

// A row of a dispatch's result: it belongs to segment (local expert, source rank).
struct PackedRow {
  int32_t expert, source;
  int32_t index;     // within the segment
  int32_t position;  // within the expert
};

// begin: the scanned lengths of the E segments, expert by expert.
__device__ __forceinline__ PackedRow find_row(const int32_t* begin, const LowLatencyShape& shape,
                                              int row) {
  int low = 0, high = shape.num_experts;
  while (high - low > 1) {  // begin[low] <= row < begin[high]
    const int middle = (low + high) / 2;
    if (begin[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int expert = low / shape.num_ranks;
  return {expert, low % shape.num_ranks, row - begin[low], row - begin[expert * shape.num_ranks]};
}

}  // namespace moe_ep
