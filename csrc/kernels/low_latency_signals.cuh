// What the kernels of low-latency mode share: which buffer an operation uses, and waits for peers.
//
// A send may write to a buffer once the peers have received its last operation, two operations ago;
// it waits for that at its start. No send waits for a receive of the same or a later operation, so
// that hooks may come in any order.
//
// Link says how ranks are reached: OneHost, or one that has, for ranks on other hosts,
//   set_word(view, peer, offset, word)              by one thread
//   put_words(view, peer, offset, source, bytes)    by a warp; no word is ever torn
//   put(view, peer, offset, source, bytes, counter) by a warp; counts up a counter of the peer, too
// where offset and counter are places in the peer's memory.
#pragma once

#include "device/block_scan.cuh"
#include "device/grid.cuh"
#include "device/rows.cuh"
#include "kernels/low_latency.h"

namespace moe_ep {

constexpr int kLowLatencyWarps = kLowLatencyThreads / kWarp;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct OneHost {
  static constexpr bool kBorder = false;
};

// Whether the peer's memory is mapped here.
template <typename Link>
__device__ __forceinline__ bool is_near(const LowLatencyView& view, int peer) {
  if constexpr (Link::kBorder) return view.hosts.same_host(view.comm.rank, peer);
  return true;
}

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

// Writes a word that carries all that its reader needs.
template <typename Link>
__device__ __forceinline__ void set_word(const LowLatencyView& view, int peer, int64_t words,
                                         int index, uint64_t word) {
  if constexpr (Link::kBorder) {
    if (!is_near<Link>(view, peer)) return Link::set_word(view, peer, words + index * 8, word);
  }
  ptx::store_relaxed_system(word_at(view, peer, words, index), word);
}

__device__ __forceinline__ int load_expert(const void* topk_idx, bool is_64_bit, int64_t slot) {
  // Truncating could make a valid index of a bad one.
  const int64_t expert = is_64_bit ? static_cast<const int64_t*>(topk_idx)[slot]
                                   : static_cast<const int32_t*>(topk_idx)[slot];
  return expert < -1 || expert >= kMaxExperts ? kMaxExperts : static_cast<int>(expert);
}

// Waits, before `operation`, until every peer has received the earlier operation `last`. All
// threads of the block call it, the last ones wait, and get false if the kernel is to end.
__device__ __forceinline__ bool poll_received(const LowLatencyView& view, uint64_t operation,
                                              uint64_t last) {
  const CommView& comm = view.comm;
  const int index = static_cast<int>(threadIdx.x) - static_cast<int>(blockDim.x) + comm.num_ranks;
  if (index < 0 || last == 0) return true;
  const int peer = (comm.rank + index) % comm.num_ranks;
  const uint64_t* word = word_at(view, comm.rank, buffer_of(view, last).received, peer);
  uint64_t seen = ptx::load_acquire_system(word);
  for (Deadline deadline; seen < last; seen = ptx::load_acquire_system(word)) {
    if (!deadline.expired(comm, comm.timeout_ns)) continue;
    seen = ptx::load_acquire_system(word);  // the last look
    if (seen >= last) break;
    record_fault(comm, peer, kPhaseBufferFree, operation, last, seen);
    return false;
  }
  return true;
}

// Waits until the buffer of an operation to be sent is free; as poll_received.
__device__ __forceinline__ bool poll_buffer_free(const LowLatencyView& view, uint64_t operation) {
  return poll_received(view, operation, operation > 2 ? operation - 2 : 0);
}

// Tells a rank how many blocks of this launch write rows that it can read, and this rank's tokens:
// every peer, or those of this host. Called by all threads of one block.
template <typename Link>
__device__ __forceinline__ void signal_senders(const LowLatencyView& view, uint64_t operation,
                                               int num_blocks, int num_tokens, bool to_all) {
  const CommView& comm = view.comm;
  if (threadIdx.x >= comm.num_ranks) return;
  const int peer = (comm.rank + threadIdx.x) % comm.num_ranks;
  if (!to_all && !is_near<Link>(view, peer)) return;
  const int64_t words = buffer_of(view, operation).senders;
  const int blocks = is_near<Link>(view, peer) ? num_blocks : 0;
  set_word<Link>(view, peer, words, comm.rank, ready_word(operation, blocks, false, num_tokens));
}

// Tells every rank of the other hosts how many messages this launch puts for it: count_of(rank).
// so_far: of LowLatencyBorder. Called by all threads of one block.
template <typename Link, typename CountOf>
__device__ __forceinline__ void signal_messages(const LowLatencyView& view, uint64_t operation,
                                                bool bad, uint64_t* so_far, CountOf count_of) {
  const CommView& comm = view.comm;
  if (threadIdx.x >= view.hosts.num_far()) return;
  const int peer = view.hosts.far_rank(threadIdx.x, view.hosts.host_of(comm.rank));
  so_far[peer] += count_of(peer);
  const uint32_t count = static_cast<uint32_t>(so_far[peer]) & kMaxLowLatencyTokens;
  set_word<Link>(view, peer, buffer_of(view, operation).messages, comm.rank,
                 ready_word(operation, view.tag, bad, count));
}

// Tells every peer of this host that this block has written its rows. All threads of the block call
// it.
template <typename Link>
__device__ __forceinline__ void signal_block(const LowLatencyView& view, uint64_t operation) {
  const CommView& comm = view.comm;
  __syncthreads();
  if (threadIdx.x >= comm.num_ranks) return;
  const int peer = (comm.rank + threadIdx.x) % comm.num_ranks;
  if (!is_near<Link>(view, peer)) return;
  const int index = comm.rank * kMaxLowLatencyBlocks + blockIdx.x;
  // Its release covers the whole block: the barrier has ordered what the others wrote before it.
  ptx::store_release_system(word_at(view, peer, buffer_of(view, operation).blocks, index),
                            operation);
}

// Ends a launch: after a send the next operation may begin, after a receive the peers are told that
// their rows have been read. Called by all threads of every block; the last block to come does it.
template <typename Link>
__device__ __forceinline__ void finish(const LowLatencyView& view, uint64_t operation) {
  const CommView& comm = view.comm;
  bool is_last = false;
  __syncthreads();
  if (threadIdx.x == 0) {
    // Nothing but reads must have happened before: an arrival of the GPU's scope is enough.
    is_last = ptx::add_acq_rel_device(&comm.control->arrived_end, 1) == gridDim.x - 1;
  }
  if (is_last) {
    comm.control->arrived_end = 0;  // for the next kernel
    if ((view.parts & kSend) != 0) {
      comm.control->operation = operation;
      if ((view.parts & kReceive) == 0) *view.ticket = operation;
    }
  }
  // A word to another host takes its thread long: each is written by another one.
  if (Link::kBorder) is_last = __syncthreads_or(is_last) != 0;
  if ((view.parts & kReceive) == 0 || !is_last) return;
  __threadfence_system();
  const int64_t words = buffer_of(view, operation).received;
  for (int i = threadIdx.x; i < comm.num_ranks; i += Link::kBorder ? kLowLatencyThreads : 1) {
    set_word<Link>(view, (comm.rank + i) % comm.num_ranks, words, comm.rank, operation);
  }
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

// Who has sent what, in shared memory.
struct Senders {
  int32_t blocks[kMaxRanks];
  int32_t tokens[kMaxRanks];
  Waited waited;
};

// Waits for a word of `peer`. False: the kernel is to end.
__device__ __forceinline__ bool poll_word(const LowLatencyView& view, const uint64_t* word,
                                          int peer, uint64_t operation, Phase phase,
                                          Senders& senders, uint64_t& seen) {
  const CommView& comm = view.comm;
  const uint32_t number = static_cast<uint32_t>(operation);
  seen = ptx::load_acquire_system(word);
  for (Deadline deadline; word_operation(seen) != number;) {
    const bool expired = deadline.expired(comm, comm.timeout_ns);
    seen = ptx::load_acquire_system(word);  // after expiry: the last look
    if (!expired || word_operation(seen) == number) continue;
    record_fault(comm, peer, phase, operation, ready_word(operation, view.tag, false, 0), seen);
    return false;
  }
  atomicMax(&senders.waited.ns[peer], ptx::global_nanoseconds() - senders.waited.start);
  return true;
}

// Looks at what a word of `peer` says about its operation. False: the kernel is to end.
__device__ __forceinline__ bool check_word(const LowLatencyView& view, int peer, uint64_t operation,
                                           Phase phase, uint64_t seen) {
  if (word_tag(seen) != view.tag) {
    record_fault(view.comm, peer, phase, operation, ready_word(operation, view.tag, false, 0),
                 seen);
    return false;
  }
  if (word_is_bad(seen)) view.comm.host->bad_peer = peer + 1;
  return true;
}

// Waits for E words beginning at `words`, E/R of each rank in order, and calls store(i, count) for
// each; and for how many blocks send. of_all: of all ranks; else those of other hosts count as
// zero. All threads of the block call it and get the same answer, after a barrier. False: the
// kernel is to end.
template <typename Link, typename Store>
__device__ __forceinline__ bool wait_words(const LowLatencyView& view, int64_t words,
                                           uint64_t operation, Phase phase, Senders& senders,
                                           bool of_all, Store store) {
  const CommView& comm = view.comm;
  const int experts = view.shape.num_experts, local = experts / comm.num_ranks;
  bool passed = true;
  for (int i = threadIdx.x; i < experts + comm.num_ranks && passed; i += kLowLatencyThreads) {
    const bool is_sender = i >= experts;
    const int peer = is_sender ? i - experts : i / local;
    uint64_t seen = 0;
    if (of_all || is_near<Link>(view, peer)) {
      const int64_t at = is_sender ? buffer_of(view, operation).senders : words;
      passed = poll_word(view, word_at(view, comm.rank, at, is_sender ? peer : i), peer, operation,
                         phase, senders, seen);
      passed = passed && (is_sender || check_word(view, peer, operation, phase, seen));
    }
    if (is_sender) {
      senders.blocks[peer] = static_cast<int32_t>(word_tag(seen));
      senders.tokens[peer] = word_count(seen);
    } else {
      store(i, word_count(seen));
    }
  }
  return __syncthreads_and(passed) != 0;
}

// Waits until all of them have written their rows; as wait_words.
__device__ __forceinline__ bool wait_blocks(const LowLatencyView& view, uint64_t operation,
                                            Phase phase, Senders& senders) {
  const CommView& comm = view.comm;
  int most = 0;
  for (int i = 0; i < comm.num_ranks; ++i) most = max(most, senders.blocks[i]);
  bool passed = true;
  for (int i = threadIdx.x; i < most * comm.num_ranks && passed; i += kLowLatencyThreads) {
    const int peer = i / most, block = i % most;
    if (block >= senders.blocks[peer]) continue;
    const int64_t words = buffer_of(view, operation).blocks;
    const uint64_t* word = word_at(view, comm.rank, words, peer * kMaxLowLatencyBlocks + block);
    uint64_t seen = ptx::load_acquire_system(word);
    for (Deadline deadline; seen != operation;) {
      const bool expired = deadline.expired(comm, comm.timeout_ns);
      seen = ptx::load_acquire_system(word);  // after expiry: the last look
      if (!expired || seen == operation) continue;
      record_fault(comm, peer, phase, operation, operation, seen);
      passed = false;
      break;
    }
    atomicMax(&senders.waited.ns[peer], ptx::global_nanoseconds() - senders.waited.start);
  }
  return __syncthreads_and(passed) != 0;
}

// Waits until all that ranks of other hosts have put has come: to this rank or, at_host, to the
// ranks of their places on this host; as wait_words.
__device__ __forceinline__ bool wait_messages(const LowLatencyView& view, uint64_t operation,
                                              Phase phase, Senders& senders, bool at_host) {
  const CommView& comm = view.comm;
  const LowLatencyBuffer& buffer = buffer_of(view, operation);
  const int host = view.hosts.host_of(comm.rank);
  bool passed = true;
  if (threadIdx.x < view.hosts.num_far()) {
    const int peer = view.hosts.far_rank(threadIdx.x, host);
    uint64_t told;
    passed = poll_word(view, word_at(view, comm.rank, buffer.messages, peer), peer, operation,
                       phase, senders, told);
    passed = passed && check_word(view, peer, operation, phase, told);
    const uint64_t expected = word_count(told);
    const uint64_t* counter = word_at(view, at_host ? view.hosts.rail(peer, host) : comm.rank,
                                      at_host ? buffer.arrived_host : buffer.arrived, peer);
    uint64_t seen = ptx::load_acquire_system(counter) & kMaxLowLatencyTokens;
    for (Deadline deadline; passed && seen != expected;) {
      const bool expired = deadline.expired(comm, comm.timeout_ns);
      seen = ptx::load_acquire_system(counter) & kMaxLowLatencyTokens;
      if (!expired || seen == expected) continue;  // after expiry: the last look
      record_fault(comm, peer, phase, operation, expected, seen);
      passed = false;
    }
    atomicMax(&senders.waited.ns[peer], ptx::global_nanoseconds() - senders.waited.start);
  }
  return __syncthreads_and(passed) != 0;
}

}  // namespace moe_ep
