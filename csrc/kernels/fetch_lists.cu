// fetch_lists: rank rows and items of every source rank, copied into this rank's plan.
#include "kernels/notify.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    fetch_lists_kernel(const __grid_constant__ FetchListsArgs args) {
  const CommView& comm = args.comm;
  const PlanView& plan = args.plan;
  if (*reinterpret_cast<volatile uint32_t*>(&comm.control->abort) != 0) return;
  const PlanHeader header = plan_header(comm.num_ranks, comm.num_experts / comm.num_ranks);
  const int first = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  const int step = static_cast<int>(gridDim.x * kThreads);
  for (int i = 0; i < comm.num_ranks; ++i) {
    // Each rank starts with itself and goes on upwards: no two read the same source at first.
    const int source = (comm.rank + i) % comm.num_ranks;
    const int rows_begin = plan.header[header.rank_row_begin + source];
    const int num_rows = plan.header[header.rank_row_begin + source + 1] - rows_begin;
    const int items_begin = plan.header[header.item_begin + source];
    const int num_items = plan.header[header.item_begin + source + 1] - items_begin;
    const RankRow* rows =
        reinterpret_cast<const RankRow*>(comm.peers[source] + comm.layout.rank_rows) +
        plan.header[header.source_rank_row + source];
    const Item* items = reinterpret_cast<const Item*>(comm.peers[source] + comm.layout.items) +
                        plan.header[header.source_item + source];
    for (int j = first; j < num_rows; j += step) {
      RankRow row = rows[j];
      row.item_begin += items_begin;
      plan.rank_rows[rows_begin + j] = row;
    }
    for (int j = first; j < num_items; j += step) plan.items[items_begin + j] = items[j];
  }
}

}  // namespace

cudaError_t launch_fetch_lists(const FetchListsArgs& args, int num_blocks, cudaStream_t stream) {
  fetch_lists_kernel<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moe_ep
