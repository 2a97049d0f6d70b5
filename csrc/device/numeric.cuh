// Element types: 16 bytes of a row to fp32 and back, and FP8 e4m3 with its scales.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "shared/types.h"

namespace moe_ep {

template <typename T>
constexpr int kPerVector = kVectorBytes / static_cast<int>(sizeof(T));

__device__ __forceinline__ void unpack(const uint4& v, float (&f)[8], __nv_bfloat16) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // a bf16 is the upper half of an fp32
    f[2 * i] = __uint_as_float(words[i] << 16);
    f[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void unpack(const uint4& v, float (&f)[8], __half) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
    f[2 * i] = pair.x;
    f[2 * i + 1] = pair.y;
  }
}
__device__ __forceinline__ void unpack(const uint4& v, float (&f)[4], float) {
  f[0] = __uint_as_float(v.x);
  f[1] = __uint_as_float(v.y);
  f[2] = __uint_as_float(v.z);
  f[3] = __uint_as_float(v.w);
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <typename T>
__device__ __forceinline__ uint4 pack(const float (&f)[8], T type) {
  return make_uint4(pack_pair(f[0], f[1], type), pack_pair(f[2], f[3], type),
                    pack_pair(f[4], f[5], type), pack_pair(f[6], f[7], type));
}
__device__ __forceinline__ uint4 pack(const float (&f)[4], float) {
  return make_uint4(__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                    __float_as_uint(f[3]));
}

// The scale of a block whose largest magnitude is amax, NaN if one of them is. Bit for bit what
// moe_ep/quant.py computes: the correction makes the product a rounded quotient (see divide).
__device__ __forceinline__ float fp8_scale(float amax, bool power_of_two) {
  constexpr float kLargest = 448.0f, kReciprocal = 1 / kLargest, kSmallestScale = 0x1p-126f;
  const float product = __fmul_rn(amax, kReciprocal);
  float scale = __fmaf_rn(__fmaf_rn(product, kLargest, -amax), -kReciprocal, product);
  if (scale < kSmallestScale) scale = kSmallestScale;
  if (power_of_two) {  // up, unless it is one already
    scale = __uint_as_float((__float_as_uint(scale) + 0x007fffffu) & 0x7f800000u);
  }
  if (!(amax < INFINITY)) return amax;
  return amax == 0.0f ? 1.0f : scale;
}

__device__ __forceinline__ uint32_t fp8_quad(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

__device__ __forceinline__ float2 fp8_pair(uint32_t two) {
  const __half2_raw raw =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two & 0xffffu), __NV_E4M3);
  return __half22float2(__half2(raw));
}

}  // namespace moe_ep
