// Waiting and signalling along a rail. Waits poll words of this rank's own memory, so they are
// bounded and end like those within a host; what leaves the host are NVSHMEM calls.
#pragma once

#include <nvshmem.h>
#include <nvshmemx.h>

#include "device/grid.cuh"
#include "shared/peer_order.h"
#include "shared/rail_view.h"

namespace moe_ep {

constexpr int kRailThreads = 512;
constexpr int kRailWarps = kRailThreads / 32;

// Whether the core's kernel of the same step has run before: its operation is then the one to name.
__device__ __forceinline__ bool follows_core(Phase phase) {
  return phase == Phase::kRailVerdict || phase == Phase::kRailSumsFree || phase == Phase::kRailSums;
}

// As signal_word; for data that came, or is summed, from several ranks: any of them may be the
// culprit.
__device__ __forceinline__ uint64_t relayed_word(const CommView& comm, uint64_t number) {
  return signal_word(comm, number) | (comm.bad_input != 0 ? 0 : comm.control->culprit);
}

// Waits until word >> shift >= expected. `host` wrote the word. False: the kernel is to end.
__device__ __forceinline__ bool wait_rail(const CommView& comm, const RailView& rail,
                                          RailSignal kind, int host, int shift, uint64_t expected,
                                          Phase phase, uint64_t& seen) {
  const uint64_t* word = rail.signal(kind, host);
  seen = ptx::load_acquire_system(word);
  for (Deadline deadline; seen >> shift < expected; seen = ptx::load_acquire_system(word)) {
    if (!deadline.expired(comm, comm.timeout_ns)) continue;
    seen = ptx::load_acquire_system(word);  // the last look
    if (seen >> shift >= expected) break;
    record_fault(comm, rail.rank_on(host) - comm.first_rank, phase,
                 comm.control->operation + (follows_core(phase) ? 0 : 1), expected << shift, seen);
    return false;
  }
  return true;
}

// Waits for a word of each of the other hosts: a signal word if `is_ready`, else a mere count. All
// threads of the block call it and get the same answer.
__device__ __forceinline__ bool wait_chunk(const CommView& comm, const RailView& rail,
                                           RailSignal kind, uint64_t chunks, Phase phase,
                                           bool is_ready) {
  bool passed = true;
  const int host = threadIdx.x;
  if (host < rail.num_hosts && host != rail.host) {
    uint64_t seen;
    passed = wait_rail(comm, rail, kind, host, is_ready ? kCulpritBits : 0, chunks, phase, seen);
    if (is_ready) note_culprit(comm, seen, chunks);
  }
  return __syncthreads_and(passed) != 0;
}

// Sets this host's word of `kind` at the ranks of the rail. Called by one warp, after arrive_last.
__device__ __forceinline__ void signal_rail(const RailView& rail, RailSignal kind, uint64_t word,
                                            int lane) {
  __threadfence_system();  // what all blocks have read and written comes before the signal
  for (int step = lane; step < rail.num_hosts - 1; step += 32) {
    const int peer = staggered_peer(rail.host, step, rail.num_hosts);
    nvshmemx_signal_op(rail.signal(kind, rail.host), word, NVSHMEM_SIGNAL_SET, rail.rank_on(peer));
  }
}

// How many chunks must have been read before one more may be put.
__device__ __forceinline__ uint64_t chunks_to_be_read(uint64_t chunks_put) {
  return chunks_put < kInboxSlots ? 0 : chunks_put + 1 - kInboxSlots;
}

// Warps of the whole grid.
__device__ __forceinline__ int64_t grid_warp() {
  return static_cast<int64_t>(blockIdx.x) * kRailWarps + threadIdx.x / 32;
}
__device__ __forceinline__ int64_t grid_warps() {
  return static_cast<int64_t>(gridDim.x) * kRailWarps;
}

__device__ __forceinline__ void count_border(uint64_t* counter, uint64_t value) {
  if (value != 0) atomicAdd(reinterpret_cast<unsigned long long*>(counter), value);
}

}  // namespace moe_ep
