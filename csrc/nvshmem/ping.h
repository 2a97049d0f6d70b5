// A put with signal from every rank to every other: what proves that the transport works, and what
// says hello and goodbye.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "shared/types.h"

namespace moe_ep {

constexpr int kPingBytes = 128;  // of a payload, each 8-byte word of which is ping_word()

MOE_EP_HOST_DEVICE uint64_t ping_word(int rank, uint64_t number) {
  return number << 16 | static_cast<uint64_t>(rank);
}

struct PingArgs {
  uint64_t* signals;  // symmetric [R]: the number of the last ping, by sender
  uint64_t* inbox;    // symmetric [R, kPingBytes / 8]: its payload, by sender
  uint64_t* outbox;   // symmetric [kPingBytes / 8]: this rank's payload
  int rank;
  int num_ranks;
  uint64_t number;  // above that of every earlier ping
};

cudaError_t launch_ping(const PingArgs& args, cudaStream_t stream);

// Whether NVSHMEM has set IBGDA up on the current device.
cudaError_t read_gpu_sends(bool* answer);

}  // namespace moe_ep
