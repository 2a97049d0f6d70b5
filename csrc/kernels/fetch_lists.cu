// fetch_lists: for plans that got room for their lists only after notify had told how much.
#include "kernels/fetch_lists.cuh"

namespace moe_ep {
namespace {

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads)
    fetch_lists_kernel(const __grid_constant__ FetchListsArgs args) {
  if (!is_aborted(args.comm)) fetch_lists(args.comm, args.plan);
}

}  // namespace

cudaError_t launch_fetch_lists(const FetchListsArgs& args, int num_blocks, cudaStream_t stream) {
  fetch_lists_kernel<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moe_ep
