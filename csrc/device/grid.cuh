// Cooperation of the blocks of one kernel: a bounded grid barrier and "who is last".
#pragma once

#include "device/wait.cuh"

namespace moe_ep {

// Counts this block as arrived; true on all threads of the block that arrives last, for which
// everything the others wrote before is visible (and cumulatively so to whom it signals). The fence
// is of system scope because peers read what was written.
__device__ __forceinline__ bool arrive_last(uint32_t* counter) {
  __shared__ uint32_t is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();  // covers the whole block: the barrier has ordered its writes before
    is_last = ptx::add_acq_rel_device(counter, 1) == gridDim.x - 1;
    if (is_last) *counter = 0;  // for the next kernel
    __threadfence_system();
  }
  __syncthreads();
  return is_last != 0;
}

// All blocks must be resident together. False: a fault elsewhere, the kernel is to end.
__device__ __forceinline__ bool grid_barrier(const CommView& comm, uint64_t operation) {
  __shared__ uint32_t passed;
  Control* control = comm.control;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    passed = 1;
    const uint32_t generation = ptx::load_acquire_device(&control->barrier_generation);
    if (ptx::add_acq_rel_device(&control->barrier_count, 1) == gridDim.x - 1) {
      control->barrier_count = 0;
      ptx::store_release_device(&control->barrier_generation, generation + 1);
    } else {
      // Longer than a wait for a peer: a block that is late because of one reports that one.
      const uint64_t limit_ns = 2 * comm.timeout_ns + 1000000000ull;
      Deadline deadline;
      while (ptx::load_acquire_device(&control->barrier_generation) == generation) {
        if (!deadline.expired(comm, limit_ns)) continue;
        record_fault(comm, comm.rank, Phase::kGrid, operation, generation + 1, generation);
        passed = 0;
        break;
      }
    }
  }
  __syncthreads();
  return passed != 0;
}

}  // namespace moe_ep
