// FP8 quantisation in registers: a lane holds 8 columns, and 16 lanes share a scale.
#pragma once

#include "device/numeric.cuh"
#include "device/ptx.cuh"
#include "shared/row_shape.h"
#include "shared/staged_source.h"

namespace moe_ep {

constexpr int kFp8Columns = 8;  // of a lane
constexpr int kLanesPerScale = kFp8Block / kFp8Columns;

// Rarely called: kept out of the way of what is.
static __device__ __noinline__ float plain_quotient(float f, float scale) {
  return __fdiv_rn(f, scale);
}

// What rounds to FP8 as f / scale, rounded to nearest, does. With a correctly rounded reciprocal
// one correction of the product gives that quotient (Markstein, 1990) as long as the remainder can
// be represented; it takes a third of the instructions of a division. Quotients that round to zero
// stay as they are, with their sign.
__device__ __forceinline__ void divide(float (&f)[kFp8Columns], float scale) {
  constexpr float kLargeScale = 0x1p90f, kRoundsToZero = 0x1p-12f;
  if (!(scale > 1 / kLargeScale && scale < kLargeScale)) {  // NaN, too
#pragma unroll
    for (int j = 0; j < kFp8Columns; ++j) f[j] = plain_quotient(f[j], scale);
    return;
  }
  const float reciprocal = __frcp_rn(scale);
#pragma unroll
  for (int j = 0; j < kFp8Columns; ++j) {
    const float q = __fmul_rn(f[j], reciprocal);
    const float corrected = __fmaf_rn(__fmaf_rn(-q, scale, f[j]), reciprocal, q);
    f[j] = fabsf(q) > kRoundsToZero ? corrected : q;
  }
}

// Quantises one vector per lane, bit for bit as moe_ep/quant.py. All lanes of the warp call it.
__device__ __forceinline__ uint2 quantize_vector(float (&f)[kFp8Columns], bool power_of_two,
                                                 float& scale) {
  uint32_t amax = 0;
#pragma unroll
  for (int j = 0; j < kFp8Columns; ++j) amax = max(amax, __float_as_uint(f[j]) & 0x7fffffffu);
#pragma unroll
  for (int step = kLanesPerScale / 2; step > 0; step /= 2) {
    amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, step));
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
