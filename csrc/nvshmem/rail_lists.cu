// fetch_chunks: the lists of a plan, copied from their publishers and cut into chunks. Nothing of
// it leaves the host.
#include "kernels/fetch_lists.cuh"
#include "nvshmem/rail_kernels.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 512;

// How many of the rank rows that `source` has published for this rank come before `token`.
__device__ int rows_before(const ListsArgs& args, const PlanHeader& at, int source, int64_t token) {
  const CommView& comm = args.comm;
  const int32_t* header = args.plan.header;
  const RankRow* rows =
      reinterpret_cast<const RankRow*>(comm.peers[source] + comm.layout.rank_rows) +
      header[at.source_rank_row + source];
  int low = 0;
  int high = header[at.rank_row_begin + source + 1] - header[at.rank_row_begin + source];
  while (low < high) {
    const int middle = (low + high) / 2;
    const int its_token = static_cast<int>(ptx::load_row16(rows + middle).x);
    if (its_token < token) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// cuts[s][c]: rank rows of source s before chunk c. A chunk's header is that of the plan, but for
// where its rank rows lie; padding is the first chunk's business.
__global__ void __launch_bounds__(kThreads, 1)
    cut_lists_kernel(const __grid_constant__ ListsArgs args) {
  const CommView& comm = args.comm;
  if (is_aborted(comm)) return;
  const int ranks = comm.num_ranks, chunks = args.num_chunks, width = chunks + 1;
  const int blocks = comm.num_experts / ranks;
  const PlanHeader at = plan_header(ranks, blocks);
  const int32_t* header = args.plan.header;
  for (int i = threadIdx.x; i < ranks * width; i += kThreads) {
    args.cuts[i] = rows_before(args, at, i / width, i % width * args.part_tokens);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < chunks * at.total; i += kThreads) {
    const int chunk = i / at.total, word = i % at.total;
    int32_t value = header[word];
    if (chunk > 0 && word == at.num_rows) value = INT32_MAX;
    const int block = word - at.expert_count;
    if (chunk > 0 && block >= 0) {
      value = header[at.expert_begin + block + 1] - header[at.expert_begin + block];
    }
    const int source = word - at.rank_row_begin;
    if (source >= 0 && source <= ranks) {
      value = 0;
      for (int s = 0; s < ranks; ++s) {
        value += args.cuts[s * width + chunk + (s < source ? 1 : 0)];
      }
    }
    args.chunk_headers[i] = value;
  }
}

__global__ void __launch_bounds__(kThreads)
    fetch_chunks_kernel(const __grid_constant__ ListsArgs args) {
  __shared__ ListCut rows, items;
  const CommView& comm = args.comm;
  const PlanView& plan = args.plan;
  if (is_aborted(comm)) return;
  const PlanHeader at = plan_header(comm.num_ranks, comm.num_experts / comm.num_ranks);
  load_cut(comm, plan.header + at.rank_row_begin, plan.header + at.source_rank_row, rows);
  load_cut(comm, plan.header + at.item_begin, plan.header + at.source_item, items);
  __syncthreads();
  const int part_tokens = static_cast<int>(args.part_tokens);
  const int num_blocks = static_cast<int>(gridDim.x);
  copy_list(
      comm, rows, num_blocks,
      [&](int source, int index) {
        const char* list = comm.peers[source] + comm.layout.rank_rows;
        return ptx::load_row16(list + index * static_cast<int64_t>(sizeof(RankRow)));
      },
      [&](int index, int source, const uint4& v) {
        const int token = static_cast<int>(v.x), chunk = token / part_tokens;
        const int begin = args.chunk_headers[chunk * at.total + at.rank_row_begin + source];
        const int cut = args.cuts[source * (args.num_chunks + 1) + chunk];
        plan.rank_rows[begin + index - rows.begin[source] - cut] = {
            token % part_tokens, static_cast<int32_t>(v.y),
            static_cast<int32_t>(v.z) + items.begin[source], static_cast<int32_t>(v.w)};
      });
  copy_list(
      comm, items, num_blocks,
      [&](int source, int index) {
        const char* list = comm.peers[source] + comm.layout.items;
        return ptx::load_row8(list + index * static_cast<int64_t>(sizeof(Item)));
      },
      [&](int index, int, const uint2& v) {
        const int slot = static_cast<int>(v.y) % (part_tokens * plan.num_slots);
        plan.items[index] = {static_cast<int32_t>(v.x), slot};
      });
}

}  // namespace

cudaError_t launch_fetch_chunks(const ListsArgs& args, int num_blocks, cudaStream_t stream) {
  cut_lists_kernel<<<1, kThreads, 0, stream>>>(args);
  fetch_chunks_kernel<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moe_ep
