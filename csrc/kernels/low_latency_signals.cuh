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
#include "device/wait.cuh"
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
__device__ __forceinline__ int first_unit() {
  return static_cast<int>(blockIdx.x * kLowLatencyWarps + threadIdx.x / kWarp);
}
__device__ __forceinline__ int unit_step() {
  return static_cast<int>(gridDim.x * kLowLatencyWarps);
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

// Looks until `look` says that it has seen enough. False: the kernel is to end, and `report` has
// said why. What this rank's own blocks wait for is told by them: to wait for them takes longer.
template <typename Look, typename Report>
__device__ __forceinline__ bool poll(const CommView& comm, Look look, Report report,
                                     bool for_itself = false) {
  if (look()) return true;
  for (Deadline deadline;;) {
    const bool expired = deadline.expired(comm, comm.timeout_ns << (for_itself ? 1 : 0));
    if (look()) return true;  // after expiry: the last look
    if (!expired) continue;
    report();
    return false;
  }
}

// The threads of a block share the words that blocks of all peers write. Calls poll_word(peer,
// block) for each that this thread sees to, until one is false; it returns, by reference, how many
// blocks the peer has. expected: mostly right, so that few threads wait.
template <typename PollWord>
__device__ __forceinline__ bool poll_block_words(const LowLatencyView& view, int expected,
                                                 PollWord poll_word) {
  const int step = static_cast<int>(view.ranks.quotient(kLowLatencyThreads));
  const int first = static_cast<int>(view.ranks.quotient(threadIdx.x));
  if (first >= step) return true;
  const int place = static_cast<int>(threadIdx.x) - first * view.shape.num_ranks + view.comm.rank;
  const int peer = place < view.shape.num_ranks ? place : place - view.shape.num_ranks;
  int num_blocks = expected;
#pragma unroll 1
  for (int block = first; block < expected; block += step) {
    if (!poll_word(peer, block, num_blocks)) return false;
  }
  if (first != 0) return true;
#pragma unroll 1
  for (int block = expected; block < num_blocks; ++block) {
    if (!poll_word(peer, block, num_blocks)) return false;
  }
  return true;
}

// Waits, before `operation`, until every peer has received the earlier operation `last`. All
// threads of the block call it, each for some words, and get false if the kernel is to end.
__device__ __forceinline__ bool poll_received(const LowLatencyView& view, uint64_t operation,
                                              uint64_t last, int expected_blocks) {
  const CommView& comm = view.comm;
  if (last == 0) return true;
  return poll_block_words(view, expected_blocks, [&](int peer, int block, int& num_blocks) {
    const uint64_t* words =
        word_at(view, comm.rank, buffer_of(view, last).received, peer * kMaxLowLatencyBlocks);
    uint64_t first, seen;
    const auto look = [&] {
      seen = ptx::load_acquire_system(words + block);
      if (block != 0 && received_operation(seen) == last) return true;
      // It was a launch of fewer blocks, or there was a later one, which tells of this one, too.
      first = ptx::load_acquire_system(words);
      num_blocks = received_blocks(first);
      return received_operation(first) >= last &&
             (block >= num_blocks || received_operation(seen) >= last);
    };
    const auto report = [&] {
      const uint64_t what = received_operation(first) < last ? first : seen;
      record_fault(comm, peer, kPhaseBufferFree, operation, last, received_operation(what));
    };
    return poll(comm, look, report);
  });
}

// Waits until the buffer of an operation to be sent is free; as poll_received.
__device__ __forceinline__ bool poll_buffer_free(const LowLatencyView& view, uint64_t operation) {
  return poll_received(view, operation, operation > 2 ? operation - 2 : 0, gridDim.x);
}

// Gives a rank of this host a word after all that this thread has done or, by a barrier, knows to
// be done.
template <typename Link>
__device__ __forceinline__ void release_word(const LowLatencyView& view, uint64_t* word,
                                             uint64_t value) {
  if (!Link::kBorder && view.one_gpu != 0) {
    ptx::fence_acq_rel_device();
  } else {
    ptx::fence_acq_rel_system();
  }
  ptx::store_relaxed_system(word, value);
}

// Tells a rank how many blocks of this launch write rows that it can read, and this rank's tokens:
// every peer, or those of this host. Called by one warp or more of one block.
template <typename Link>
__device__ __forceinline__ void signal_senders(const LowLatencyView& view, uint64_t operation,
                                               int num_blocks, int num_tokens, bool to_all) {
  const CommView& comm = view.comm;
  if (threadIdx.x >= kWarp) return;
  const int64_t words = buffer_of(view, operation).senders;
  for (int i = threadIdx.x; i < comm.num_ranks; i += kWarp) {
    const int peer = (comm.rank + i) % comm.num_ranks;
    const bool near = is_near<Link>(view, peer);
    if (!to_all && !near) continue;
    set_word<Link>(view, peer, words, comm.rank,
                   ready_word(operation, near ? num_blocks : 0, false, num_tokens));
  }
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

// Gives every peer of this host this block's word, among `words`, after all that the block has
// done. All threads of the block call it.
template <typename Link>
__device__ __forceinline__ void signal_block(const LowLatencyView& view, int64_t words,
                                             uint64_t word) {
  const CommView& comm = view.comm;
  __syncthreads();
  if (threadIdx.x >= comm.num_ranks) return;
  const int peer = (comm.rank + threadIdx.x) % comm.num_ranks;
  if (!is_near<Link>(view, peer)) return;
  const int index = comm.rank * kMaxLowLatencyBlocks + blockIdx.x;
  release_word<Link>(view, word_at(view, peer, words, index), word);
}

// Tells every peer of this host that this block has read its rows, and those of other hosts, by the
// last block to come, that all blocks have; as signal_block.
template <typename Link>
__device__ __forceinline__ void signal_received(const LowLatencyView& view, uint64_t operation) {
  const int64_t words = buffer_of(view, operation).received;
  signal_block<Link>(view, words, received_word(operation, gridDim.x));
  if constexpr (Link::kBorder) {
    const int rank = view.comm.rank;
    if (!arrive_last(&view.comm.control->arrived_stage)) return;
    __threadfence_system();
    for (int i = threadIdx.x; i < view.hosts.num_far(); i += kLowLatencyThreads) {
      set_word<Link>(view, view.hosts.far_rank(i, view.hosts.host_of(rank)), words,
                     rank * kMaxLowLatencyBlocks, received_word(operation, 1));
    }
  }
}

// Once all blocks of a send know the operation's number, the next launch may have another. Called
// by all threads of every block, after a barrier.
__device__ __forceinline__ void count_operation(const LowLatencyView& view, uint64_t operation) {
  constexpr int kThread = kLowLatencyThreads / 2;  // its warp has little else to do
  Control* control = view.comm.control;
  if (threadIdx.x != kThread) return;
  if (ptx::add_acq_rel_device(&control->arrived_end, 1) != gridDim.x - 1) return;
  control->arrived_end = 0;  // for the next launch
  control->operation = operation;
  if ((view.parts & kReceive) == 0) *view.ticket = operation;
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
  __device__ __forceinline__ void note(int peer) {
    atomicMax(&ns[peer], ptx::global_nanoseconds() - start);
  }
  __device__ __forceinline__ void add_to(int64_t* waiting_stats, int num_ranks) const {
    if (threadIdx.x >= num_ranks) return;
    waiting_stats[threadIdx.x] += static_cast<int64_t>(ns[threadIdx.x]);
  }
};

// What is known of the senders, in shared memory.
struct Senders {
  int32_t tokens[kMaxRanks];
  Waited waited;  // used where somebody wants to know it
};

// What a launch waits for, before it receives.
struct Awaited {
  int64_t words;  // E of them, E/R of each rank in order
  uint64_t operation;
  Phase phase;
  bool of_all;     // the words and the numbers of tokens of all ranks; else of this host's only
  bool at_host;    // between hosts, messages to this host; else to this rank alone
  int64_t* stats;  // LowLatencyDispatchArgs::waiting_stats
  Waited* waited;  // null where nobody wants to know
};

// Waits for a ready word of `peer` for the operation. False: the kernel is to end.
__device__ __forceinline__ bool poll_ready(const LowLatencyView& view, const Awaited& awaited,
                                           const uint64_t* word, int peer, uint64_t& seen) {
  const CommView& comm = view.comm;
  const uint32_t operation = static_cast<uint32_t>(awaited.operation);
  const uint64_t expected = ready_word(awaited.operation, view.tag, false, 0);
  const auto look = [&] {
    return word_operation(seen = ptx::load_acquire_system(word)) == operation;
  };
  const auto report = [&] {
    record_fault(comm, peer, awaited.phase, awaited.operation, expected, seen);
  };
  if (!poll(comm, look, report)) return false;
  if (word_tag(seen) == view.tag) {
    if (word_is_bad(seen)) comm.host->bad_peer = peer + 1;
    return true;
  }
  // Another shape. After a fault no block sends, so first the peer must have this rank's word, too.
  const int own = comm.rank * static_cast<int>(view.ranks.quotient(view.shape.num_experts));
  const uint64_t* to_itself = word_at(view, comm.rank, awaited.words, own);
  const auto sent = [&] {
    return word_operation(ptx::load_acquire_system(to_itself)) == operation;
  };
  poll(comm, sent, [] {}, true);
  report();
  return false;
}

// Waits for the E words and calls store(i, count) for each; 0 for those that are not awaited.
template <typename Link, typename Store>
__device__ __forceinline__ bool poll_words(const LowLatencyView& view, const Awaited& awaited,
                                           Store store) {
  const int local = static_cast<int>(view.ranks.quotient(view.shape.num_experts));
  // The last threads first: the first ones see to blocks.
  for (int i = kLowLatencyThreads - 1 - static_cast<int>(threadIdx.x); i < view.shape.num_experts;
       i += kLowLatencyThreads) {
    const int peer = i / local;
    uint64_t seen = 0;
    if (awaited.of_all || is_near<Link>(view, peer)) {
      const uint64_t* word = word_at(view, view.comm.rank, awaited.words, i);
      if (!poll_ready(view, awaited, word, peer, seen)) return false;
      if (awaited.waited != nullptr) awaited.waited->note(peer);
    }
    store(i, word_count(seen));
  }
  return true;
}

// Waits until all blocks of all peers of this host that write rows have written them, and for
// everybody's number of tokens.
template <typename Link>
__device__ __forceinline__ bool poll_blocks(const LowLatencyView& view, const Awaited& awaited,
                                            Senders& senders) {
  const CommView& comm = view.comm;
  const uint64_t operation = awaited.operation;
  const LowLatencyBuffer& buffer = buffer_of(view, operation);
  return poll_block_words(view, gridDim.x, [&](int peer, int block, int& num_blocks) {
    if (!awaited.of_all && !is_near<Link>(view, peer)) return true;
    const uint64_t* sender = word_at(view, comm.rank, buffer.senders, peer);
    const uint64_t* word =
        word_at(view, comm.rank, buffer.blocks, peer * kMaxLowLatencyBlocks + block);
    uint64_t said, seen;
    const auto knows = [&] { return word_operation(said) == static_cast<uint32_t>(operation); };
    const auto look = [&] {
      seen = ptx::load_acquire_system(word);
      if (block != 0 && seen == operation) return true;
      said = ptx::load_relaxed_system(sender);
      num_blocks = static_cast<int>(word_tag(said));
      return knows() && (block >= num_blocks || seen == operation);
    };
    const auto report = [&] {
      const uint64_t ready = ready_word(operation, view.tag, false, 0);
      record_fault(comm, peer, awaited.phase, operation, knows() ? operation : ready,
                   knows() ? seen : said);
    };
    if (!poll(comm, look, report, peer == comm.rank)) return false;
    if (awaited.waited != nullptr) awaited.waited->note(peer);
    if (block == 0) senders.tokens[peer] = word_count(said);
    return true;
  });
}

// Waits until all that ranks of other hosts have put has come: to this rank or, at_host, to the
// ranks of their places on this host.
__device__ __forceinline__ bool poll_messages(const LowLatencyView& view, const Awaited& awaited) {
  const CommView& comm = view.comm;
  const LowLatencyBuffer& buffer = buffer_of(view, awaited.operation);
  const int host = view.hosts.host_of(comm.rank);
  if (threadIdx.x >= view.hosts.num_far()) return true;
  const int peer = view.hosts.far_rank(threadIdx.x, host);
  uint64_t told, seen;
  if (!poll_ready(view, awaited, word_at(view, comm.rank, buffer.messages, peer), peer, told)) {
    return false;
  }
  const uint64_t expected = word_count(told);
  const uint64_t* counter = word_at(view, awaited.at_host ? view.hosts.rail(peer, host) : comm.rank,
                                    awaited.at_host ? buffer.arrived_host : buffer.arrived, peer);
  const auto look = [&] {
    seen = ptx::load_acquire_system(counter) & kMaxLowLatencyTokens;
    return seen == expected;
  };
  const auto report = [&] {
    record_fault(comm, peer, awaited.phase, awaited.operation, expected, seen);
  };
  if (!poll(comm, look, report)) return false;
  if (awaited.waited != nullptr) awaited.waited->note(peer);
  return true;
}

// All waits at once: nothing but the slowest word counts. All threads of the block call it and get
// the same answer, after a barrier. False: the kernel is to end.
template <typename Link, typename Store>
__device__ __forceinline__ bool wait_for_senders(const LowLatencyView& view, Awaited awaited,
                                                 Senders& senders, Store store) {
  const bool noted = awaited.stats != nullptr && blockIdx.x == 0;
  awaited.waited = noted ? &senders.waited : nullptr;
  if (noted) senders.waited.begin();
  bool passed = poll_words<Link>(view, awaited, store);
  passed = passed && poll_blocks<Link>(view, awaited, senders);
  if constexpr (Link::kBorder) passed = passed && poll_messages(view, awaited);
  if (__syncthreads_and(passed) == 0) return false;
  // All peers have sent, so nothing that comes next can keep this launch from its end.
  ptx::launch_next();
  if (noted) senders.waited.add_to(awaited.stats, view.comm.num_ranks);
  return true;
}

}  // namespace moe_ep
