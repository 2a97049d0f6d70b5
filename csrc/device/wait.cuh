// Bounded waits for peers. A wait that expires leaves one record for the host, makes every other
// wait of this rank give up, and lets the kernel end: no trap, so that the CUDA context (and under
// MPS everybody else's) survives.
#pragma once

#include "device/ptx.cuh"
#include "shared/comm_view.h"

namespace moe_ep {

constexpr int kPollsPerCheck = 64;  // of the clock and the abort word

__device__ __forceinline__ bool is_aborted(const CommView& comm) {
  return *reinterpret_cast<volatile uint32_t*>(&comm.control->abort) != 0;
}

static __device__ __noinline__ void record_fault(const CommView& comm, int peer, Phase phase,
                                                 uint64_t operation, uint64_t expected,
                                                 uint64_t seen) {
  if (atomicCAS(&comm.control->abort, 0u, 1u) != 0) return;  // the first fault is the one to tell
  FaultRecord& fault = comm.host->fault;
  fault.rank = comm.first_rank + comm.rank;
  fault.peer = comm.first_rank + peer;
  fault.phase = phase;
  fault.operation = operation;
  fault.expected = expected;
  fault.seen = seen;
  __threadfence_system();
  fault.state = 1;
}

struct Deadline {
  uint64_t start = ptx::global_nanoseconds();
  int polls = 0;

  // Looks at the clock and the abort word once in a while. True: give up, unless a last look helps.
  __device__ __forceinline__ bool expired(const CommView& comm, uint64_t limit_ns) {
    if (++polls % kPollsPerCheck != 0) return false;
    return is_aborted(comm) || ptx::global_nanoseconds() - start > limit_ns;
  }
};

// What a rank signals when it has finished its part of `operation`.
__device__ __forceinline__ uint64_t signal_word(const CommView& comm, uint64_t operation) {
  const int culprit = comm.bad_input != 0 ? comm.first_rank + comm.rank + 1 : 0;
  return operation << kCulpritBits | static_cast<uint64_t>(culprit);
}

// Notes whose input to `number` is bad, if the word is of that and says so.
__device__ __forceinline__ void note_culprit(const CommView& comm, uint64_t word, uint64_t number) {
  const uint32_t culprit = static_cast<uint32_t>(word & kCulpritMask);
  if (culprit == 0 || word >> kCulpritBits != number) return;
  comm.control->culprit = culprit;
  comm.host->bad_peer = culprit;
}

// Waits until `peer` has signalled `operation` or a later one. Called by one thread, whose acquire
// covers what other threads do after a barrier with it. False: the kernel is to end.
__device__ __forceinline__ bool wait_signal(const CommView& comm, Signal kind, int peer,
                                            uint64_t operation, Phase phase) {
  const uint64_t* word = comm.signal(comm.rank, kind, peer);
  uint64_t seen = ptx::load_acquire_system(word);
  // Longer for this rank's own blocks: one that is late because of a peer reports the peer.
  const uint64_t limit_ns = comm.timeout_ns << (peer == comm.rank ? 1 : 0);
  for (Deadline deadline; seen >> kCulpritBits < operation; seen = ptx::load_acquire_system(word)) {
    if (!deadline.expired(comm, limit_ns)) continue;
    seen = ptx::load_acquire_system(word);  // the last look
    if (seen >> kCulpritBits >= operation) break;
    record_fault(comm, peer, phase, operation, operation << kCulpritBits, seen);
    return false;
  }
  note_culprit(comm, seen, operation);
  return true;
}

// Signals every peer. Called by one warp of the last block to arrive, after `arrive_last`.
__device__ __forceinline__ void signal_peers(const CommView& comm, Signal kind, uint64_t word,
                                             int lane) {
  for (int i = lane; i < comm.num_ranks; i += 32) {
    const int peer = (comm.rank + i) % comm.num_ranks;
    ptx::store_release_system(comm.signal(peer, kind, comm.rank), word);
  }
}

}  // namespace moe_ep
