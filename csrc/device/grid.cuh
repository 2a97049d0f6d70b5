// Cooperation of the blocks of one kernel: a bounded grid barrier and "who is last".
#pragma once

#include "device/wait.cuh"

namespace moe_ep {

// Counts this block as arrived; true on all threads of the block that arrives last, for which
// everything the others wrote before is visible (and cumulatively so to whom it signals). The fence
// is of system scope because peers read what was written; one thread's covers the whole block,
// whose writes the barrier has put before it.
__device__ __forceinline__ bool arrive_last(uint32_t* counter) {
  __shared__ uint32_t is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_acq_rel_system();
    is_last = ptx::add_acq_rel_device(counter, 1) == gridDim.x - 1;
    if (is_last) *counter = 0;  // for the next kernel
  }
  __syncthreads();
  return is_last != 0;
}

// Of the first num_blocks blocks, which must be resident together. False: a fault elsewhere, the
// kernel is to end.
__device__ __forceinline__ bool grid_barrier(const CommView& comm, int num_blocks,
                                             uint64_t operation) {
  // These blocks together add the highest bit, so that it flips, and the lower ones are zero again.
  constexpr uint32_t kFlip = 0x80000000u;
  __shared__ uint32_t passed;
  uint32_t* barrier = &comm.control->barrier;
  __syncthreads();
  if (threadIdx.x == 0) {
    passed = 1;
    const uint32_t share = blockIdx.x == 0 ? kFlip - (num_blocks - 1) : 1;
    const uint32_t before = ptx::add_acq_rel_device(barrier, share);
    // Longer than a wait for a peer: a block that is late because of one reports that one.
    const uint64_t limit_ns = 2 * comm.timeout_ns + 1000000000ull;
    Deadline deadline;
    for (uint32_t now; ((now = ptx::load_acquire_device(barrier)) & kFlip) == (before & kFlip);) {
      if (!deadline.expired(comm, limit_ns)) continue;
      record_fault(comm, comm.rank, Phase::kGrid, operation, before, now);
      passed = 0;
      break;
    }
  }
  __syncthreads();
  return passed != 0;
}

}  // namespace moe_ep
