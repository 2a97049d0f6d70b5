// stage of rows as FP8: quantised on the way, one scale per 128 columns.
//
// A lane works on 8 columns at a time, and 16 lanes share a scale.
#include "device/staging.cuh"
#include "kernels/by_type.cuh"
#include "kernels/stage.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 640;
constexpr int kColumns = 8;  // of a lane
constexpr int kLanesPerScale = kFp8Block / kColumns;

template <typename T>
__device__ __forceinline__ void load_columns(const T* source, float (&f)[kColumns]) {
  constexpr int kVectors = kColumns / kPerVector<T>;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float part[kPerVector<T>];
    unpack(ptx::load_row16(source + i * kPerVector<T>), part, T());
#pragma unroll
    for (int j = 0; j < kPerVector<T>; ++j) f[i * kPerVector<T> + j] = part[j];
  }
}

// Quantises one vector per lane; 16 lanes share a scale. All lanes of the warp call it.
__device__ __forceinline__ uint2 quantize_vector(float (&f)[kColumns], bool power_of_two,
                                                 float& scale) {
  uint32_t amax = 0;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) amax = max(amax, __float_as_uint(f[j]) & 0x7fffffffu);
#pragma unroll
  for (int step = kLanesPerScale / 2; step > 0; step /= 2) {
    amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  }
  scale = fp8_scale(amax, power_of_two);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) f[j] = __fdiv_rn(f[j], scale);
  return {fp8_quad(f[0], f[1], f[2], f[3]), fp8_quad(f[4], f[5], f[6], f[7])};
}

// The vectors of all rows are one sequence: a row has a whole number of scales, and so of half
// warps, so that lanes that share a scale are always in the same row.
template <typename T>
__device__ void quantize_rows(const StageArgs& args, const StagedRows& stage) {
  constexpr int kUnroll = 4;
  const int lane = threadIdx.x % kWarp;
  const int64_t total = args.plan.num_tokens * args.hidden / kColumns;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const T* x = reinterpret_cast<const T*>(args.x);
  for (int64_t first = warp * kUnroll * kWarp; first < total; first += warps * kUnroll * kWarp) {
    float f[kUnroll][kColumns];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t vector = first + u * kWarp + lane;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) f[u][j] = 0.0f;
      if (vector < total) load_columns(x + vector * kColumns, f[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t vector = first + u * kWarp + lane;
      float scale;
      const uint2 q = quantize_vector(f[u], args.power_of_two_scales != 0, scale);
      if (vector >= total) continue;
      ptx::store_row8(stage.rows + vector * kColumns, q);
      if (lane % kLanesPerScale == 0) stage.scales[vector / kLanesPerScale] = scale;
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    stage_fp8_kernel(const __grid_constant__ StageArgs args) {
  const CommView& comm = args.comm;
  if (is_aborted(comm) || !may_stage(comm, args.plan, args.before_notify)) return;
  const StagingSlot slot = current_slot(comm, args.before_notify);
  if (!wait_all_peers(comm, Signal::kStageDone, slot.last_used_by, Phase::kStageFree)) return;
  const StagedRows stage = staged_rows(comm, slot, comm.rank);
  quantize_rows<T>(args, stage);
  stage_probs(args.plan, args.probs, stage);
  publish_stage(comm, slot);
}

}  // namespace

cudaError_t launch_stage_fp8(const StageArgs& args, int num_blocks, cudaStream_t stream) {
  return launch_by_type(args.type, [&](auto zero) {
    stage_fp8_kernel<decltype(zero)><<<num_blocks, kThreads, 0, stream>>>(args);
  });
}

}  // namespace moe_ep
