// Division by a number that a launch knows, with one multiplication in place of some 30
// instructions.
#pragma once

#include "shared/types.h"

namespace moe_ep {

// Of n below 2^31 (Granlund and Montgomery, 1994): n * ceil(2^p / d) / 2^p with 2^(p - 31) >= d.
struct Divisor {
  uint32_t divisor, multiplier, shift;

  MOE_EP_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier >> shift);
  }
  MOE_EP_HOST_DEVICE uint32_t remainder(uint32_t n, uint32_t quotient) const {
    return n - quotient * divisor;
  }
};

inline Divisor divide_by(uint32_t divisor) {
  uint32_t shift = 31;
  while (uint64_t{1} << (shift - 31) < divisor) ++shift;
  const uint64_t power = uint64_t{1} << shift;
  return {divisor, static_cast<uint32_t>((power + divisor - 1) / divisor), shift};
}

}  // namespace moe_ep
