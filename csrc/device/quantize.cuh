// FP8 quantisation in registers: a lane holds 8 columns, and 16 lanes share a scale.
#pragma once

#include "device/numeric.cuh"
#include "device/ptx.cuh"
#include "shared/row_shape.h"
#include "shared/staged_source.h"

namespace moe_ep {

constexpr int kFp8Columns = 8;  // of a lane
constexpr int kLanesPerScale = kFp8Block / kFp8Columns;

// f / scale, rounded to nearest. The correctly rounded reciprocal and one correction of the product
// give that quotient as long as the remainder can be represented (Markstein, 1990). It is taken
// negative: so a zero keeps its sign. What rounds to zero in FP8 may be less exact.
__device__ __forceinline__ void divide(float (&f)[kFp8Columns], float scale) {
  constexpr float kFar = 0x1p90f, kNearer = 0x1p64f;
  if (!(scale > 1 / kFar && scale < kFar)) {  // hardly ever
    float factor = scale < 1 ? kNearer : 1 / kNearer;
    scale *= factor;
    if (!(scale < INFINITY)) {  // then the product is the quotient
      factor = scale == INFINITY ? 0.0f : scale;
      scale = 1.0f;
    }
#pragma unroll
    for (int j = 0; j < kFp8Columns; ++j) f[j] *= factor;
  }
  float reciprocal = ptx::approximate_reciprocal(scale);
  reciprocal = __fmaf_rn(reciprocal, __fmaf_rn(-scale, reciprocal, 1.0f), reciprocal);
#pragma unroll
  for (int j = 0; j < kFp8Columns; ++j) {
    const float q = __fmul_rn(f[j], reciprocal);
    f[j] = __fmaf_rn(__fmaf_rn(q, scale, -f[j]), -reciprocal, q);
  }
}

// Quantises one vector per lane, bit for bit as moe_ep/quant.py. All lanes of the warp call it.
__device__ __forceinline__ uint2 quantize_vector(float (&f)[kFp8Columns], bool power_of_two,
                                                 float& scale) {
  float amax = fabsf(f[0]);
#pragma unroll
  for (int j = 1; j < kFp8Columns; ++j) amax = ptx::max_or_nan(amax, fabsf(f[j]));
#pragma unroll
  for (int step = kLanesPerScale / 2; step > 0; step /= 2) {
    amax = ptx::max_or_nan(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  }
  scale = fp8_scale(amax, power_of_two);
  divide(f, scale);
  return {fp8_quad(f[0], f[1], f[2], f[3]), fp8_quad(f[4], f[5], f[6], f[7])};
}

// The vectors of all rows are one sequence: a row has a whole number of scales, and so of half
// warps, so that lanes that share a scale are always in the same row.
template <typename T>
__device__ __forceinline__ void quantize_as(const StagedSource& source, int64_t num_tokens,
                                            char* rows, float* scales, int first_block) {
  constexpr int kLoads = kFp8Columns / kPerVector<T>;  // of 16 bytes, for a lane's columns
  constexpr int kUnroll = kVectorsPerLane / kLoads;
  const int lane = threadIdx.x % kWarp, warps_per_block = static_cast<int>(blockDim.x) / kWarp;
  const int64_t total = num_tokens * source.hidden / kFp8Columns;
  const int64_t step = static_cast<int64_t>(gridDim.x - first_block) * warps_per_block * kUnroll;
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x - first_block) * warps_per_block + threadIdx.x / kWarp;
  for (int64_t first = warp * kUnroll; first * kWarp < total; first += step) {
    uint4 v[kUnroll][kLoads];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t vector = (first + u) * kWarp + lane;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        v[u][i] = make_uint4(0, 0, 0, 0);
        const char* x = source.x + (vector * kLoads + i) * kVectorBytes;
        if (vector < total) v[u][i] = ptx::load_row16(x);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t vector = (first + u) * kWarp + lane;
      float f[kFp8Columns];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        float part[kPerVector<T>];
        unpack(v[u][i], part, T());
#pragma unroll
        for (int j = 0; j < kPerVector<T>; ++j) f[i * kPerVector<T> + j] = part[j];
      }
      float scale;
      const uint2 q = quantize_vector(f, source.power_of_two_scales != 0, scale);
      if (vector >= total) continue;
      ptx::store_row8(rows + vector * kFp8Columns, q);
      if (lane % kLanesPerScale == 0) scales[vector / kLanesPerScale] = scale;
    }
  }
}

// Quantises x [T, H] to rows [T, H] and scales [T, H/128] with all blocks from first_block on.
__device__ __forceinline__ void quantize(const StagedSource& source, int64_t num_tokens, char* rows,
                                         float* scales, int first_block = 0) {
  switch (source.type) {
    case DataType::kBf16:
      return quantize_as<__nv_bfloat16>(source, num_tokens, rows, scales, first_block);
    case DataType::kFp16:
      return quantize_as<__half>(source, num_tokens, rows, scales, first_block);
    case DataType::kFp32:
      return quantize_as<float>(source, num_tokens, rows, scales, first_block);
  }
}

}  // namespace moe_ep
