// Exclusive prefix sum over shared memory by one block.
#pragma once

#include <cstdint>

namespace moe_ep {

// Replaces values[i] by the sum of values[0..i); values[count] gets the total. All kThreads threads
// of the block call it; `values` has count + 1 entries.
template <int kThreads>
__device__ __forceinline__ void block_exclusive_scan(int32_t* values, int count) {
  __shared__ int32_t warp_sums[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int per_thread = (count + kThreads - 1) / kThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * per_thread, count);
  const int end = min(begin + per_thread, count);
  int32_t sum = 0;
  for (int i = begin; i < end; ++i) sum += values[i];
  int32_t inclusive = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t below = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane >= step) inclusive += below;
  }
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  int32_t running = inclusive - sum;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) running += i < warp ? warp_sums[i] : 0;
  for (int i = begin; i < end; ++i) {
    const int32_t value = values[i];
    values[i] = running;
    running += value;
  }
  if (threadIdx.x == kThreads - 1) values[count] = running;
  __syncthreads();
}

__device__ __forceinline__ int32_t warp_sum(int32_t value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

}  // namespace moe_ep
