// notify: a stable histogram and scan of topk_idx, the exchange of counts, and the publication of
// the lists by which the destinations pull.
//
// Tokens are cut into one contiguous range per warp of the blocks that count. Each warp counts its
// range, the counts are scanned over warps, blocks and ranks, and each warp then walks its range
// once more, in order, to give every slot its place. Nothing depends on the order in which warps
// run. While counts travel, the rows of the dispatch that follows are staged.
#include "device/staging.cuh"
#include "kernels/fetch_lists.cuh"
#include "kernels/notify.h"
#include "kernels/notify_offsets.cuh"

namespace moe_ep {
namespace {

// Tells the host how much to allocate, before anything else is done with the counts.
__device__ void report(const NotifyArgs& args, const NotifyVerdict& verdict, const Offsets& offsets,
                       const RankCounts& by_rank) {
  const CommView& comm = args.comm;
  HostState* host = comm.host;
  const bool valid = verdict.status == NotifyStatus::kOk;
  if (args.verdict != nullptr) {  // of one host: nothing is decided yet
    if (threadIdx.x == 0) *args.verdict = verdict;
    return;
  }
  if (!args.report_to_host && (valid || host->sticky_status != 0)) return;
  const int local = comm.num_experts / comm.num_ranks;
  const int32_t* scan = offsets.scan + comm.rank * local;
  if (args.report_to_host && valid) {
    for (int i = threadIdx.x; i < local; i += kNotifyThreads) {
      host->expert_rows[i] = scan[i + 1] - scan[i];
      host->expert_count[i] = offsets.counts[i];
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  host->capacity = args.capacity;
  host->culprit = verdict.culprit;
  host->worst_rows = verdict.worst_rows;
  host->max_tokens = verdict.max_tokens;
  if (!args.report_to_host) {
    ptx::store_release_system(&host->sticky_status, static_cast<uint32_t>(verdict.status));
    return;
  }
  host->status = verdict.status;
  host->num_rows = scan[local] - scan[0];
  host->num_rank_rows = by_rank.rows.begin[comm.num_ranks];
  host->num_items = by_rank.items.begin[comm.num_ranks];
  ptx::store_release_system(&host->counts_ready, 1);  // covers what the barrier has put before it
}

// Writes the plan's header; a failed notify leaves a plan of nothing. Called by one block.
__device__ void write_header(const NotifyArgs& args, NotifyStatus status, const Offsets& offsets,
                             const RankCounts& by_rank) {
  const bool valid = status == NotifyStatus::kOk;
  const int ranks = args.comm.num_ranks, local = args.comm.num_experts / ranks;
  const int32_t* scan = offsets.scan + args.comm.rank * local;
  const PlanHeader at = plan_header(ranks, local);
  int32_t* header = args.plan.header;
  for (int i = threadIdx.x; i <= local; i += kNotifyThreads) {
    header[at.expert_begin + i] = valid ? scan[i] - scan[0] : 0;
    if (i < local) header[at.expert_count + i] = valid ? offsets.counts[i] : 0;
  }
  for (int s = threadIdx.x; s <= ranks; s += kNotifyThreads) {
    header[at.rank_row_begin + s] = valid ? by_rank.rows.begin[s] : 0;
    header[at.item_begin + s] = valid ? by_rank.items.begin[s] : 0;
    if (s == ranks) break;
    header[at.source_rank_row + s] = by_rank.rows.at_source[s];
    header[at.source_item + s] = by_rank.items.at_source[s];
  }
  if (threadIdx.x != 0) return;
  header[at.num_rows] = valid ? scan[local] - scan[0] : 0;
  header[at.status] = static_cast<int32_t>(status);
  header[at.num_rank_rows] = valid ? by_rank.rows.begin[ranks] : 0;
  header[at.num_items] = valid ? by_rank.items.begin[ranks] : 0;
}

// Gives every slot its row and publishes rank rows and items, in order. `counters` holds, per warp,
// the next free place of each column, among this rank's own.
__device__ void publish_lists(const NotifyArgs& args, SlotsAhead& ahead, int32_t* counters,
                              const Offsets& offsets) {
  const CommView& comm = args.comm;
  const PlanView& plan = args.plan;
  const int experts = comm.num_experts, ranks = comm.num_ranks;
  const int destinations = max_destinations(comm.max_slots, ranks);
  int32_t* mine = counters + threadIdx.x / 32 * count_columns(experts, ranks);
  char* own = comm.peers[comm.rank];
  RankRow* rank_rows = reinterpret_cast<RankRow*>(own + comm.layout.rank_rows);
  Item* items = reinterpret_cast<Item*>(own + comm.layout.items);
  const uint32_t lane = threadIdx.x % 32, lower = (1u << lane) - 1;
  const int expert_bits = bits_below(experts);
  for (SlotWalk walk(args, ahead, true); walk.advance();) {
    const int expert = walk.expert(), destination = walk.destination();
    const bool used = expert >= 0;
    const uint32_t same_expert = lanes_with_equal(expert, expert_bits, used);
    const uint32_t same_rank = walk.same_rank();
    const uint32_t all_firsts = __ballot_sync(kAllLanes, walk.is_first());
    const uint32_t firsts = all_firsts & same_rank;
    const uint32_t token_firsts = all_firsts & walk.token_lanes();
    const uint32_t share = same_rank & walk.token_lanes();  // of this token for this destination
    int position = 0;  // destinations of the token below this one
    int order = 0;     // slots of the share with a lower (expert, k)
#pragma unroll 4
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
    if (used) {  // from places among this rank's own to places among all
      row += offsets.base[expert];
      rank_row += offsets.base[rank_rows_column(experts) + destination];
    }
    if (!walk.has_slot()) continue;
    const int64_t slot = walk.slot();
    const int32_t token = static_cast<int32_t>(walk.token());
    plan.row_of_slot[slot] = row;
    if (static_cast<int>(lane) == walk.first_lane())
      plan.num_partials[token] = __popc(token_firsts);
    if (!used) continue;
    const int32_t segment = offsets.base[items_column(experts, ranks) + destination];
    const int32_t item = segment + item_begin + order;
    items[item] = {row, static_cast<int32_t>(slot)};
    plan.item_of_slot[slot] = item;
    if (!walk.is_first()) continue;
    const int32_t partial =
        args.part_tokens == 0 ? rank_row : token % args.part_tokens * destinations + position;
    rank_rows[rank_row] = {token, partial, item_begin, __popc(share)};
    plan.partial_slots[token * destinations + position] = partial;
  }
}

__device__ void clear_slots(const PlanView& plan) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kNotifyThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(counting_blocks()) * kNotifyThreads;
  for (int64_t i = first; i < plan.num_tokens * plan.num_slots; i += step) plan.row_of_slot[i] = -1;
  for (int64_t i = first; i < plan.num_tokens; i += step) plan.num_partials[i] = 0;
}

// Stages the rows of the dispatch to follow, if it is given them. Block 0 leaves that to others, if
// there are any: the host gets its report meanwhile, and can launch that dispatch. False: the
// kernel is to end.
__device__ bool stage_meanwhile(const NotifyArgs& args) {
  const int first_block = first_token_block();
  if (args.stages == 0 || blockIdx.x < first_block) return true;
  const StagingSlot slot = current_slot(args.comm);
  return stage_rows(args.comm, args.plan, args.source, slot, first_block);
}

// Tells the peers that lists and staged rows are there, once all blocks have done their part.
__device__ void publish(const NotifyArgs& args, uint64_t operation) {
  const CommView& comm = args.comm;
  if (!arrive_last(&comm.control->arrived_end) || threadIdx.x >= 32) return;
  if (args.stages != 0) signal_staged(comm, operation + 1);  // the number of the dispatch
  signal_peers(comm, Signal::kListsReady, operation << kCulpritBits, threadIdx.x);
}

__global__ void __launch_bounds__(kNotifyThreads, 1)
    notify_kernel(const __grid_constant__ NotifyArgs args) {
  extern __shared__ int32_t shared[];
  const CommView& comm = args.comm;
  if (is_aborted(comm)) return;
  const uint64_t operation = comm.control->operation + 1;
  const int columns = count_columns(comm.num_experts, comm.num_ranks);
  __shared__ RankCounts by_rank;
  __shared__ SlotsAhead slots_ahead[kNotifyWarps];
  SlotsAhead& ahead = slots_ahead[threadIdx.x / 32];
  int32_t* counters = shared;  // [warps][columns]
  int32_t* base = counters + kNotifyWarps * columns;
  const Offsets offsets{base, base + columns, base + columns + comm.num_experts + 1};

  const bool counts = blockIdx.x < counting_blocks();
  if (counts) {
    count_slots(args, ahead, counters, args.scratch);
    if (!grid_barrier(comm, counting_blocks(), operation)) return;
    if (blockIdx.x == 0)
      send_counts(args, operation, args.scratch);
    else
      add_blocks_before(counters, args.scratch, columns);
  }
  if (!stage_meanwhile(args)) return;
  if (!counts) return publish(args, operation);
  CountMatrix matrix(comm, operation);
  if (!wait_for_counts(comm, matrix)) return;
  if (!compute_offsets(args, matrix, offsets, by_rank)) return;

  const NotifyVerdict& verdict = by_rank.verdict;
  const bool valid = verdict.status == NotifyStatus::kOk;
  if (blockIdx.x == 0) {
    report(args, verdict, offsets, by_rank);
    write_header(args, verdict.status, offsets, by_rank);
  }
  if (valid) {
    publish_lists(args, ahead, counters, offsets);
  } else {
    clear_slots(args.plan);
  }

  publish(args, operation);
  // Ending only when all ranks have published makes one notify a barrier: no rank can be so far
  // ahead that it overwrites counts or lists somebody still reads.
  if (!wait_all_peers(comm, Signal::kListsReady, operation, Phase::kLists)) return;
  if (valid && args.plan.rank_rows != nullptr) {
    fetch_lists(comm, args.plan, by_rank.rows, by_rank.items, counting_blocks());
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  // A failed one uses up the number of the dispatch, too, for which rows may have been staged; but
  // not between hosts, where that is never so.
  comm.control->operation = valid || args.verdict != nullptr ? operation : operation + 1;
}

int64_t shared_bytes(int num_experts, int num_ranks) {
  const int64_t columns = count_columns(num_experts, num_ranks);
  const int64_t words = (kNotifyWarps + 1) * columns + num_experts + 1 + num_experts / num_ranks;
  return words * static_cast<int64_t>(sizeof(int32_t));
}

}  // namespace

int64_t notify_scratch_words(int num_experts, int num_ranks) {
  return static_cast<int64_t>(kMaxNotifyBlocks) * count_columns(num_experts, num_ranks);
}

cudaError_t prepare_notify(int num_experts, int num_ranks) {
  cudaFuncAttributes now{};
  const cudaError_t error = cudaFuncGetAttributes(&now, notify_kernel);
  if (error != cudaSuccess) return error;
  // The limit belongs to the function: what another communicator needs must not be taken from it.
  const int needed = static_cast<int>(shared_bytes(num_experts, num_ranks));
  return cudaFuncSetAttribute(
      notify_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
      needed > now.maxDynamicSharedSizeBytes ? needed : now.maxDynamicSharedSizeBytes);
}

cudaError_t launch_notify(const NotifyArgs& args, int num_blocks, cudaStream_t stream) {
  const int64_t bytes = shared_bytes(args.comm.num_experts, args.comm.num_ranks);
  const bool all = args.stages != 0 || num_blocks < kMaxNotifyBlocks;
  const int blocks = all ? num_blocks : kMaxNotifyBlocks;
  notify_kernel<<<blocks, kNotifyThreads, bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moe_ep
