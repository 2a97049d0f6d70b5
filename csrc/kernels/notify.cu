// notify: a stable histogram and scan of topk_idx, the exchange of counts, and the publication of
// the lists by which the destinations pull.
//
// Tokens are cut into one contiguous range per warp of the grid. Each warp counts its range, the
// counts are scanned over warps, blocks and ranks, and each warp then walks its range once more, in
// order, to give every slot its place. Nothing depends on the order in which warps run.
#include "device/block_scan.cuh"
#include "device/grid.cuh"
#include "kernels/fetch_lists.cuh"
#include "kernels/notify.h"
#include "kernels/notify_counts.cuh"

namespace moe_ep {
namespace {

// The same on all ranks, since all see the same matrix. Called by all threads of a block.
__device__ NotifyVerdict judge(const NotifyArgs& args, const int32_t* matrix, const int32_t* scan) {
  __shared__ int32_t bad[kMaxRanks], tokens[kMaxRanks];
  const CommView& comm = args.comm;
  const int experts = comm.num_experts, ranks = comm.num_ranks, local = experts / ranks;
  for (int r = threadIdx.x; r < ranks; r += kNotifyThreads) {
    const int32_t* row = matrix + r * count_columns(experts, ranks);
    bad[r] = row[bad_index_column(experts, ranks)];
    tokens[r] = row[num_tokens_column(experts, ranks)];
  }
  __syncthreads();
  NotifyVerdict verdict{};
  int bad_rank = -1, fullest = 0;
  for (int r = ranks - 1; r >= 0; --r) {
    if (bad[r] > 0) bad_rank = r;
    verdict.max_tokens = max(verdict.max_tokens, tokens[r]);
    const int rows = scan[(r + 1) * local] - scan[r * local];
    if (rows >= verdict.worst_rows) verdict.worst_rows = rows, fullest = r;
  }
  const bool overflow = args.capacity > 0 && verdict.worst_rows > args.capacity;
  verdict.culprit = bad_rank >= 0 ? bad_rank : fullest;
  verdict.status = bad_rank >= 0                          ? NotifyStatus::kBadInput
                   : verdict.max_tokens > comm.max_tokens ? NotifyStatus::kNeedsRoom
                   : overflow                             ? NotifyStatus::kOverflow
                                                          : NotifyStatus::kOk;
  return verdict;
}

// Adds the padding of each expert to its last block. sizes: [E] rows of each block.
__device__ void pad_blocks(const NotifyArgs& args, int32_t* sizes) {
  const int blocks = max(args.blocks_per_expert, 1);
  for (int e = threadIdx.x; e < args.comm.num_experts / blocks; e += kNotifyThreads) {
    int32_t rows = 0;
    for (int i = 0; i < blocks; ++i) rows += sizes[e * blocks + i];
    sizes[e * blocks + blocks - 1] +=
        static_cast<int32_t>(align_up(rows, args.row_alignment)) - rows;
  }
  __syncthreads();
}

// Computes the block's offsets from the matrix of counts.
__device__ void compute_offsets(const NotifyArgs& args, const int32_t* matrix,
                                const Offsets& offsets) {
  const CommView& comm = args.comm;
  const int experts = comm.num_experts, ranks = comm.num_ranks, local = experts / ranks;
  const int width = count_columns(experts, ranks);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int e = threadIdx.x; e < experts; e += kNotifyThreads) {
    constexpr int kLoads = 8;  // at once
    int32_t total = 0, before = 0;
    for (int first = 0; first < ranks; first += kLoads) {
      int32_t counts[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        counts[i] = first + i < ranks ? matrix[(first + i) * width + e] : 0;
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + i < comm.rank) before += counts[i];
        total += counts[i];
      }
    }
    offsets.base[e] = before;
    offsets.scan[e] = total;
  }
  const int32_t* mine = matrix + comm.rank * width;
  for (int d = warp; d < ranks; d += kNotifyWarps) {
    const int rows_at = rank_rows_column(experts), items_at = items_column(experts, ranks);
    int32_t rows = 0, items = 0;
    for (int i = lane; i < d; i += 32) rows += mine[rows_at + i], items += mine[items_at + i];
    rows = warp_sum(rows);
    items = warp_sum(items);
    if (lane == 0) offsets.base[rows_at + d] = rows;
    if (lane == 0) offsets.base[items_at + d] = items;
  }
  __syncthreads();
  pad_blocks(args, offsets.scan);
  block_exclusive_scan<kNotifyThreads>(offsets.scan, experts);
  for (int e = threadIdx.x; e < experts; e += kNotifyThreads) {
    offsets.base[e] += offsets.scan[e] - offsets.scan[e / local * local];
  }
  __syncthreads();
}

// Writes the plan's header; a failed notify leaves a plan of nothing. Called by one block.
__device__ void write_header(const NotifyArgs& args, const int32_t* matrix, const int32_t* scan,
                             NotifyStatus status) {
  const bool valid = status == NotifyStatus::kOk;
  const CommView& comm = args.comm;
  const int experts = comm.num_experts, ranks = comm.num_ranks, local = experts / ranks;
  const int width = count_columns(experts, ranks);
  const int first = comm.rank * local;
  __shared__ int32_t row_counts[kMaxRanks], item_counts[kMaxRanks];
  const PlanHeader at = plan_header(ranks, local);
  int32_t* header = args.plan.header;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i <= local; i += kNotifyThreads) {
    header[at.expert_begin + i] = valid ? scan[first + i] - scan[first] : 0;
    if (i == local) continue;
    int32_t count = 0;
    for (int s = 0; s < ranks; ++s) count += matrix[s * width + first + i];
    header[at.expert_count + i] = valid ? count : 0;
  }
  for (int s = warp; s < ranks; s += kNotifyWarps) {
    const int32_t* row = matrix + s * width;
    const int rows_at = rank_rows_column(experts), items_at = items_column(experts, ranks);
    int32_t skipped_rows = 0, skipped_items = 0;
    for (int d = lane; d < comm.rank; d += 32) {
      skipped_rows += row[rows_at + d];
      skipped_items += row[items_at + d];
    }
    skipped_rows = warp_sum(skipped_rows);
    skipped_items = warp_sum(skipped_items);
    if (lane != 0) continue;
    row_counts[s] = valid ? row[rows_at + comm.rank] : 0;
    item_counts[s] = valid ? row[items_at + comm.rank] : 0;
    header[at.source_rank_row + s] = skipped_rows;
    header[at.source_item + s] = skipped_items;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t rows = 0, items = 0;
    for (int s = 0; s <= ranks; ++s) {
      header[at.rank_row_begin + s] = rows;
      header[at.item_begin + s] = items;
      if (s == ranks) break;
      rows += row_counts[s];
      items += item_counts[s];
    }
    header[at.num_rows] = valid ? scan[first + local] - scan[first] : 0;
    header[at.status] = static_cast<int32_t>(status);
    header[at.num_rank_rows] = rows;
    header[at.num_items] = items;
  }
  __syncthreads();
}

// Tells the host how much to allocate, before anything else is done with the counts.
__device__ void report(const NotifyArgs& args, const NotifyVerdict& verdict) {
  const CommView& comm = args.comm;
  HostState* host = comm.host;
  const int local = comm.num_experts / comm.num_ranks;
  const PlanHeader at = plan_header(comm.num_ranks, local);
  const int32_t* header = args.plan.header;
  if (args.verdict != nullptr) {
    if (threadIdx.x == 0) *args.verdict = verdict;
    return;
  }
  if (!args.report_to_host) {
    if (threadIdx.x == 0 && verdict.status != NotifyStatus::kOk && host->sticky_status == 0) {
      host->culprit = verdict.culprit;
      host->worst_rows = verdict.worst_rows;
      host->max_tokens = verdict.max_tokens;
      host->capacity = args.capacity;
      __threadfence_system();
      host->sticky_status = static_cast<uint32_t>(verdict.status);
    }
    return;
  }
  for (int i = threadIdx.x; i < local; i += kNotifyThreads) {
    host->expert_rows[i] = header[at.expert_begin + i + 1] - header[at.expert_begin + i];
    host->expert_count[i] = header[at.expert_count + i];
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x != 0) return;
  host->capacity = args.capacity;
  host->status = verdict.status;
  host->culprit = verdict.culprit;
  host->worst_rows = verdict.worst_rows;
  host->max_tokens = verdict.max_tokens;
  host->num_rows = header[at.num_rows];
  host->num_rank_rows = header[at.num_rank_rows];
  host->num_items = header[at.num_items];
  __threadfence_system();
  host->counts_ready = 1;
}

// Gives every slot its row and publishes rank rows and items, in order. `counters` holds, per warp,
// the next free place of each column.
__device__ void publish_lists(const NotifyArgs& args, int32_t* counters, const Offsets& offsets) {
  const CommView& comm = args.comm;
  const PlanView& plan = args.plan;
  const int experts = comm.num_experts, ranks = comm.num_ranks;
  const int destinations = max_destinations(comm.max_slots, ranks);
  int32_t* mine = counters + threadIdx.x / 32 * count_columns(experts, ranks);
  char* own = comm.peers[comm.rank];
  RankRow* rank_rows = reinterpret_cast<RankRow*>(own + comm.layout.rank_rows);
  Item* items = reinterpret_cast<Item*>(own + comm.layout.items);
  const uint32_t lane = threadIdx.x % 32, lower = (1u << lane) - 1;
  for (SlotWalk walk(args); walk.advance();) {
    const int expert = walk.expert(), destination = walk.destination();
    const bool used = expert >= 0;
    const uint32_t same_expert = __match_any_sync(kAllLanes, expert);
    const uint32_t same_rank = walk.same_rank();
    const uint32_t all_firsts = __ballot_sync(kAllLanes, walk.is_first());
    const uint32_t firsts = all_firsts & same_rank;
    const uint32_t token_firsts = all_firsts & walk.token_lanes();
    const uint32_t share = same_rank & walk.token_lanes();  // of this token for this destination
    int position = 0;  // destinations of the token below this one
    int order = 0;     // slots of the share with a lower (expert, k)
    for (int i = 0; i < plan.num_slots; ++i) {
      const int other = min(walk.first_lane() + i, 31);
      const int its_expert = __shfl_sync(kAllLanes, expert, other);
      const int its_destination = __shfl_sync(kAllLanes, destination, other);
      position += (token_firsts >> other & 1) != 0 && its_destination < destination;
      order += its_destination == destination &&
               (its_expert < expert || (its_expert == expert && other < lane));
    }
    int32_t *next_row = nullptr, *next_rank_row = nullptr, *next_item = nullptr;
    int32_t row = -1, rank_row = 0, item_begin = 0;
    if (used) {
      next_row = mine + expert;
      next_rank_row = mine + rank_rows_column(experts) + destination;
      next_item = mine + items_column(experts, ranks) + destination;
      row = *next_row + __popc(same_expert & lower);
      rank_row = *next_rank_row + __popc(firsts & lower);
      item_begin = *next_item + __popc(same_rank & ~share & lower);
    }
    __syncwarp();
    if (used && (same_expert >> lane) == 1) *next_row = row + 1;  // the highest lane of its group
    if (used && (same_rank >> lane) == 1) {
      *next_rank_row += __popc(firsts);
      *next_item += __popc(same_rank);
    }
    __syncwarp();
    if (!walk.has_slot()) continue;
    const int64_t slot = walk.slot();
    const int32_t token = static_cast<int32_t>(walk.token());
    plan.row_of_slot[slot] = row;
    if (static_cast<int>(lane) == walk.first_lane())
      plan.num_partials[token] = __popc(token_firsts);
    if (!used) continue;
    items[item_begin + order] = {row, static_cast<int32_t>(slot)};
    plan.item_of_slot[slot] = item_begin + order;
    if (!walk.is_first()) continue;
    const int32_t segment = offsets.base[items_column(experts, ranks) + destination];
    const int32_t partial =
        args.part_tokens == 0 ? rank_row : token % args.part_tokens * destinations + position;
    rank_rows[rank_row] = {token, partial, item_begin - segment, __popc(share)};
    plan.partial_slots[token * destinations + position] = partial;
  }
}

__device__ void clear_slots(const PlanView& plan) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kNotifyThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kNotifyThreads;
  for (int64_t i = first; i < plan.num_tokens * plan.num_slots; i += step) plan.row_of_slot[i] = -1;
  for (int64_t i = first; i < plan.num_tokens; i += step) plan.num_partials[i] = 0;
}

__global__ void __launch_bounds__(kNotifyThreads, 1)
    notify_kernel(const __grid_constant__ NotifyArgs args) {
  extern __shared__ int32_t shared[];
  const CommView& comm = args.comm;
  if (is_aborted(comm)) return;
  const uint64_t operation = comm.control->operation + 1;
  const int columns = count_columns(comm.num_experts, comm.num_ranks);
  int32_t* counters = shared;  // [warps][columns]
  const Offsets offsets{counters + kNotifyWarps * columns, counters + (kNotifyWarps + 1) * columns};
  int32_t* block_counts = args.scratch;
  int32_t* matrix = args.scratch + kMaxNotifyBlocks * columns;

  count_slots(args, counters, block_counts);
  if (!grid_barrier(comm, operation)) return;
  send_counts(args, operation, block_counts);
  receive_counts(comm, operation, matrix);
  if (!grid_barrier(comm, operation) || is_aborted(comm)) return;

  compute_offsets(args, matrix, offsets);
  const NotifyVerdict verdict = judge(args, matrix, offsets.scan);
  const bool valid = verdict.status == NotifyStatus::kOk;
  if (blockIdx.x == 0) {
    if (threadIdx.x == 0) report_wait(comm);
    write_header(args, matrix, offsets.scan, verdict.status);
    report(args, verdict);
  }
  if (valid) {
    const int32_t* before = block_counts + static_cast<int64_t>(blockIdx.x) * columns;
    // The last two columns have no places.
    for (int c = threadIdx.x; c < columns - 2; c += kNotifyThreads) {
      const int32_t begin = before[c] + offsets.base[c];
      for (int w = 0; w < kNotifyWarps; ++w) counters[w * columns + c] += begin;
    }
    __syncthreads();
    publish_lists(args, counters, offsets);
  } else {
    clear_slots(args.plan);
  }

  if (arrive_last(&comm.control->arrived_end) && threadIdx.x < 32) {
    signal_peers(comm, Signal::kListsReady, operation << 1, threadIdx.x);
  }
  // Ending only when all ranks have published makes one notify a barrier: no rank can be so far
  // ahead that it overwrites counts or lists somebody still reads.
  if (!wait_all_peers(comm, Signal::kListsReady, operation, Phase::kLists)) return;
  if (valid && args.plan.rank_rows != nullptr) fetch_lists(comm, args.plan);
  if (blockIdx.x == 0 && threadIdx.x == 0) comm.control->operation = operation;
}

int64_t shared_bytes(int num_experts, int num_ranks) {
  const int64_t columns = count_columns(num_experts, num_ranks);
  return ((kNotifyWarps + 1) * columns + num_experts + 1) * static_cast<int64_t>(sizeof(int32_t));
}

}  // namespace

int64_t notify_scratch_words(int num_experts, int num_ranks) {
  return static_cast<int64_t>(kMaxNotifyBlocks + num_ranks) * count_columns(num_experts, num_ranks);
}

cudaError_t prepare_notify(int num_experts, int num_ranks) {
  return cudaFuncSetAttribute(notify_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes(num_experts, num_ranks)));
}

cudaError_t launch_notify(const NotifyArgs& args, int num_blocks, cudaStream_t stream) {
  const int64_t bytes = shared_bytes(args.comm.num_experts, args.comm.num_ranks);
  const int blocks = num_blocks < kMaxNotifyBlocks ? num_blocks : kMaxNotifyBlocks;
  notify_kernel<<<blocks, kNotifyThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moe_ep
