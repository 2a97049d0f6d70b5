#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstddef>

#include "nvshmem/ping.h"
#include "shared/peer_order.h"

namespace moe_ep {
namespace {

__global__ void ping_kernel(const PingArgs args) {
  constexpr int kWords = kPingBytes / sizeof(uint64_t);
  if (threadIdx.x < kWords) args.outbox[threadIdx.x] = ping_word(args.rank, args.number);
  __threadfence_system();
  __syncwarp();
  // The last step is this rank itself: its own word is set like those of its peers.
  for (int step = 0; step < args.num_ranks; ++step) {
    const int peer = staggered_peer(args.rank, step, args.num_ranks);
    nvshmemx_putmem_signal_nbi_warp(args.inbox + args.rank * kWords, args.outbox, kPingBytes,
                                    args.signals + args.rank, args.number, NVSHMEM_SIGNAL_SET,
                                    peer);
  }
  if (threadIdx.x == 0) nvshmem_quiet();
}

}  // namespace

cudaError_t launch_ping(const PingArgs& args, cudaStream_t stream) {
  ping_kernel<<<1, 32, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t read_gpu_sends(bool* answer) {
  constexpr size_t kOffset = offsetof(nvshmemi_device_host_state_t, ibgda_is_initialized);
  return cudaMemcpyFromSymbol(answer, nvshmemi_device_state_d, sizeof(*answer), kOffset);
}

}  // namespace moe_ep
