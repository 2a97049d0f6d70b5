// Low-latency dispatch and combine whose ranks are on several hosts: the kernels of one host, with
// NVSHMEM calls where memory is another host's.
#include <nvshmem.h>
#include <nvshmemx.h>

#include "kernels/low_latency_combine.cuh"
#include "kernels/low_latency_dispatch.cuh"
#include "nvshmem/low_latency_kernels.h"

namespace moe_ep {
namespace {

// Every rank's memory is one symmetric block: this rank's address of a place names it everywhere.
struct Nvshmem {
  static constexpr bool kBorder = true;

  static __device__ __noinline__ void set_word(const LowLatencyView& view, int peer, int64_t offset,
                                               uint64_t word) {
    char* mine = view.comm.peers[view.comm.rank];
    nvshmemx_signal_op(reinterpret_cast<uint64_t*>(mine + offset), word, NVSHMEM_SIGNAL_SET, peer);
  }

  // Neither memory nor a network splits an aligned word of eight bytes.
  static __device__ __noinline__ void put_words(const LowLatencyView& view, int peer,
                                                int64_t offset, const char* source, int64_t bytes) {
    char* mine = view.comm.peers[view.comm.rank];
    nvshmemx_putmem_nbi_warp(mine + offset, source, bytes, peer);
  }

  static __device__ __noinline__ void put(const LowLatencyView& view, int peer, int64_t offset,
                                          const char* source, int64_t bytes,
                                          int64_t counter_offset) {
    char* mine = view.comm.peers[view.comm.rank];
    nvshmemx_putmem_signal_nbi_warp(mine + offset, source, bytes,
                                    reinterpret_cast<uint64_t*>(mine + counter_offset), 1,
                                    NVSHMEM_SIGNAL_ADD, peer);
  }
};

}  // namespace

cudaError_t launch_hosts_dispatch(const LowLatencyDispatchArgs& args,
                                  const LowLatencyLaunch& launch) {
  return launch_dispatch<Nvshmem>(args, launch);
}

cudaError_t launch_hosts_combine(const LowLatencyCombineArgs& args,
                                 const LowLatencyLaunch& launch) {
  return launch.run(low_latency_combine_kernel<Nvshmem>, args);
}

}  // namespace moe_ep
