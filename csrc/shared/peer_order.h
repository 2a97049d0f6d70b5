// In which order a rank visits its peers.
#pragma once

#include "shared/types.h"

namespace moe_ep {

// The peer of `me` among `n` at `step`, 0 <= step < n: each rank starts with its successor and ends
// with itself, so that in one step no two ranks aim at one target. n - 1 steps visit the others.
MOE_EP_HOST_DEVICE int staggered_peer(int me, int step, int n) {
  return static_cast<int>((static_cast<int64_t>(me) + 1 + step) % n);
}

}  // namespace moe_ep
