// stage of rows as FP8: quantised on the way, one scale per 128 columns.
#include "device/quantize.cuh"
#include "device/staging.cuh"
#include "kernels/by_type.cuh"
#include "kernels/stage.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 640;

template <typename T>
__device__ __forceinline__ void load_columns(const T* source, float (&f)[kFp8Columns]) {
  constexpr int kVectors = kFp8Columns / kPerVector<T>;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float part[kPerVector<T>];
    unpack(ptx::load_row16(source + i * kPerVector<T>), part, T());
#pragma unroll
    for (int j = 0; j < kPerVector<T>; ++j) f[i * kPerVector<T> + j] = part[j];
  }
}

// The vectors of all rows are one sequence: a row has a whole number of scales, and so of half
// warps, so that lanes that share a scale are always in the same row.
template <typename T>
__device__ void quantize_rows(const StageArgs& args, const StagedRows& stage) {
  constexpr int kUnroll = 4;
  const int lane = threadIdx.x % kWarp;
  const int64_t total = args.plan.num_tokens * args.hidden / kFp8Columns;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / kWarp);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  const T* x = reinterpret_cast<const T*>(args.x);
  for (int64_t first = warp * kUnroll * kWarp; first < total; first += warps * kUnroll * kWarp) {
    float f[kUnroll][kFp8Columns];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t vector = first + u * kWarp + lane;
#pragma unroll
      for (int j = 0; j < kFp8Columns; ++j) f[u][j] = 0.0f;
      if (vector < total) load_columns(x + vector * kFp8Columns, f[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t vector = first + u * kWarp + lane;
      float scale;
      const uint2 q = quantize_vector(f[u], args.power_of_two_scales != 0, scale);
      if (vector >= total) continue;
      ptx::store_row8(stage.rows + vector * kFp8Columns, q);
      if (lane % kLanesPerScale == 0) stage.scales[vector / kLanesPerScale] = scale;
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    stage_fp8_kernel(const __grid_constant__ StageArgs args) {
  const CommView& comm = args.comm;
  if (args.rows_out != nullptr) {
    quantize_rows<T>(args, {args.rows_out, args.scales_out, nullptr});
    return;
  }
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
