// Rank rows and items of every source rank, copied into this rank's plan.
#pragma once

#include "device/cursor.cuh"
#include "kernels/notify.h"

namespace moe_ep {

// Where a list is cut by source rank, in shared memory.
struct ListCut {
  int32_t begin[kMaxRanks + 1];  // in the plan
  int32_t at_source[kMaxRanks];  // first of our elements in what the source has published
};

__device__ __forceinline__ void load_cut(const CommView& comm, const int32_t* begin,
                                         const int32_t* at_source, ListCut& cut) {
  for (int i = threadIdx.x; i <= comm.num_ranks; i += blockDim.x) {
    cut.begin[i] = begin[i];
    if (i < comm.num_ranks) cut.at_source[i] = at_source[i];
  }
}

// Calls load(source, index there) and store(index in the plan, source, value) for every element,
// several loads at a time, with all threads of num_blocks blocks.
template <typename Load, typename Store>
__device__ __forceinline__ void copy_list(const CommView& comm, const ListCut& cut, int num_blocks,
                                          Load load, Store store) {
  constexpr int kLoads = 4;
  const int total = cut.begin[comm.num_ranks];
  const int step = num_blocks * static_cast<int>(blockDim.x);
  int source = 0;
  for (int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); first < total;
       first += kLoads * step) {
    decltype(load(0, 0)) values[kLoads];
    int sources[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = first + i * step;
      if (index >= total) continue;
      while (index >= cut.begin[source + 1]) ++source;
      sources[i] = source;
      values[i] = load(source, index - cut.begin[source] + cut.at_source[source]);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int index = first + i * step;
      if (index < total) store(index, sources[i], values[i]);
    }
  }
}

// Called by the first num_blocks blocks, once the lists of all sources are known to be published.
// The cuts are those of the plan's header.
__device__ __forceinline__ void fetch_lists(const CommView& comm, const PlanView& plan,
                                            const ListCut& rows, const ListCut& items,
                                            int num_blocks) {
  copy_list(
      comm, rows, num_blocks,
      [&](int source, int index) {
        const char* list = comm.peers[source] + comm.layout.rank_rows;
        return ptx::load_row16(list + index * static_cast<int64_t>(sizeof(RankRow)));
      },
      [&](int index, int source, const uint4& v) {
        plan.rank_rows[index] = {static_cast<int32_t>(v.x), static_cast<int32_t>(v.y),
                                 static_cast<int32_t>(v.z) + items.begin[source],
                                 static_cast<int32_t>(v.w)};
      });
  copy_list(
      comm, items, num_blocks,
      [&](int source, int index) {
        const char* list = comm.peers[source] + comm.layout.items;
        return ptx::load_row8(list + index * static_cast<int64_t>(sizeof(Item)));
      },
      [&](int index, int, const uint2& v) {
        plan.items[index] = {static_cast<int32_t>(v.x), static_cast<int32_t>(v.y)};
      });
}

}  // namespace moe_ep
