// FP8 quantisation in registers: a lane holds 8 columns, and 16 lanes share a scale.
#pragma once

#include "device/numeric.cuh"

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

}  // namespace moe_ep
