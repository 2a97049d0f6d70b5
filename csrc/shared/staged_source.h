// What a dispatch sends: the tokens of this rank, as they are or quantised on the way.
#pragma once

#include <cstdint>

#include "shared/types.h"

namespace moe_ep {

struct StagedSource {
  const char* x;       // [T, H]
  const float* probs;  // [T, K] or null
  int64_t row_bytes;   // of x
  DataType type;       // of x
  int32_t hidden;
  int32_t to_fp8;  // 1: rows become FP8 e4m3, with a scale per 128 columns
  int32_t power_of_two_scales;
};

}  // namespace moe_ep
