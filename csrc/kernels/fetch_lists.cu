// fetch_lists: for plans that got room for their lists only after notify had told how much.
#include "kernels/fetch_lists.cuh"

namespace moe_ep {
namespace {

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads)
    fetch_lists_kernel(const __grid_constant__ FetchListsArgs args) {
  __shared__ ListCut rows, items;
  const CommView& comm = args.comm;
  if (is_aborted(comm)) return;
  const PlanHeader at = plan_header(comm.num_ranks, comm.num_experts / comm.num_ranks);
  const int32_t* header = args.plan.header;
  load_cut(comm, header + at.rank_row_begin, header + at.source_rank_row, rows);
  load_cut(comm, header + at.item_begin, header + at.source_item, items);
  __syncthreads();
  fetch_lists(comm, args.plan, rows, items, static_cast<int>(gridDim.x));
}

}  // namespace

cudaError_t launch_fetch_lists(const FetchListsArgs& args, int num_blocks, cudaStream_t stream) {
  fetch_lists_kernel<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moe_ep
