// Second part of notify: from the counts of all ranks to where each of their rows belongs, and to
// whether the dispatch can go on.
#pragma once

#include "device/block_scan.cuh"
#include "kernels/fetch_lists.cuh"
#include "kernels/notify_counts.cuh"

namespace moe_ep {

// What a block knows once all counts have arrived.
struct Offsets {
  int32_t* base;    // [columns] where this rank's share of each column begins
  int32_t* scan;    // [E+1] rows before each expert, over all ranks, padding included
  int32_t* counts;  // [L] rows of each local expert that hold a token
};

// The same by rank, in shared memory of its own.
struct RankCounts {
  ListCut rows, items;  // of this rank, by source
  int32_t bad[kMaxRanks], tokens[kMaxRanks];
  NotifyVerdict verdict;
};

// The same on all ranks, since all see the same matrix. Called by one warp.
__device__ inline void judge(const NotifyArgs& args, const int32_t* scan, RankCounts& by_rank) {
  const CommView& comm = args.comm;
  const int ranks = comm.num_ranks, local = comm.num_experts / ranks;
  int bad_rank = kMaxRanks, most_tokens = 0, most_rows = -1, fullest = 0;
  for (int r = threadIdx.x; r < ranks; r += 32) {
    if (by_rank.bad[r] > 0) bad_rank = min(bad_rank, r);
    most_tokens = max(most_tokens, by_rank.tokens[r]);
    const int rows = scan[(r + 1) * local] - scan[r * local];
    if (rows > most_rows) most_rows = rows, fullest = r;
  }
  bad_rank = __reduce_min_sync(kAllLanes, bad_rank);
  most_tokens = __reduce_max_sync(kAllLanes, most_tokens);
  const int worst_rows = __reduce_max_sync(kAllLanes, most_rows);
  fullest = __reduce_min_sync(kAllLanes, most_rows == worst_rows ? fullest : kMaxRanks);
  if (threadIdx.x != 0) return;
  const bool is_bad = bad_rank < kMaxRanks;
  const bool overflow = args.capacity > 0 && worst_rows > args.capacity;
  by_rank.verdict.culprit = is_bad ? bad_rank : fullest;
  by_rank.verdict.worst_rows = worst_rows;
  by_rank.verdict.max_tokens = most_tokens;
  by_rank.verdict.status = is_bad                          ? NotifyStatus::kBadInput
                           : most_tokens > comm.max_tokens ? NotifyStatus::kNeedsRoom
                           : overflow                      ? NotifyStatus::kOverflow
                                                           : NotifyStatus::kOk;
}

// Between hosts: adds the padding of each expert to its last block. sizes: [E] rows of each block.
__device__ inline void pad_blocks(const NotifyArgs& args, int32_t* sizes) {
  const int blocks = args.blocks_per_expert;
  for (int e = threadIdx.x; e < args.comm.num_experts / blocks; e += kNotifyThreads) {
    int32_t rows = 0;
    for (int i = 0; i < blocks; ++i) rows += sizes[e * blocks + i];
    sizes[e * blocks + blocks - 1] +=
        static_cast<int32_t>(align_up(rows, args.row_alignment)) - rows;
  }
  __syncthreads();
}

// Adds up the counts of each expert over the ranks.
__device__ inline void add_expert_counts(const NotifyArgs& args, CountMatrix& matrix,
                                         const Offsets& offsets) {
  const CommView& comm = args.comm;
  const int local = comm.num_experts / comm.num_ranks, first = comm.rank * local;
  for (int e = threadIdx.x; e < comm.num_experts; e += kNotifyThreads) {
    constexpr int kLoads = 8;  // at once
    int32_t total = 0, before = 0;
    for (int begin = 0; begin < comm.num_ranks; begin += kLoads) {
      uint64_t words[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (begin + i < comm.num_ranks) words[i] = matrix.load(begin + i, e);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (begin + i >= comm.num_ranks) continue;
        const int32_t count = matrix.value(words[i], begin + i, e);
        if (begin + i < comm.rank) before += count;
        total += count;
      }
    }
    offsets.base[e] = before;
    const int64_t padded = align_up(total, args.row_alignment);
    offsets.scan[e] = static_cast<int32_t>(args.blocks_per_expert > 1 ? total : padded);
    if (e >= first && e < first + local) offsets.counts[e - first] = total;
  }
}

// Adds up what goes from rank to rank, a warp per peer: the last ones, which have fewer experts to
// see to.
__device__ inline void add_rank_counts(const CommView& comm, CountMatrix& matrix,
                                       const Offsets& offsets, RankCounts& by_rank) {
  const int rows_at = rank_rows_column(comm.num_experts);
  const int items_at = items_column(comm.num_experts, comm.num_ranks);
  const int flags_at = bad_index_column(comm.num_experts, comm.num_ranks);  // then: tokens
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, me = comm.rank;
  for (int r = kNotifyWarps - 1 - warp; r < comm.num_ranks; r += kNotifyWarps) {
    int32_t sent_rows = 0, sent_items = 0;  // from here, to ranks before r
    int32_t rows = 0, items = 0;            // from r, to ranks before this one
    const uint64_t flag = matrix.load(r, flags_at + lane % 2);
    for (int i = lane; i < comm.num_ranks; i += 32) {
      uint64_t words[4] = {};
      if (i < r) words[0] = matrix.load(me, rows_at + i), words[1] = matrix.load(me, items_at + i);
      if (i <= me) words[2] = matrix.load(r, rows_at + i), words[3] = matrix.load(r, items_at + i);
      if (i < r) sent_rows += matrix.value(words[0], me, rows_at + i);
      if (i < r) sent_items += matrix.value(words[1], me, items_at + i);
      if (i <= me) {
        const int32_t its_rows = matrix.value(words[2], r, rows_at + i);
        const int32_t its_items = matrix.value(words[3], r, items_at + i);
        if (i < me) rows += its_rows, items += its_items;
        if (i == me) by_rank.rows.begin[r + 1] = its_rows, by_rank.items.begin[r + 1] = its_items;
      }
    }
    if (lane == 0) by_rank.bad[r] = matrix.value(flag, r, flags_at);
    if (lane == 1) by_rank.tokens[r] = matrix.value(flag, r, flags_at + 1);
    sent_rows = warp_sum(sent_rows);
    sent_items = warp_sum(sent_items);
    rows = warp_sum(rows);
    items = warp_sum(items);
    if (lane != 0) continue;
    offsets.base[rows_at + r] = sent_rows;
    offsets.base[items_at + r] = sent_items;
    by_rank.rows.at_source[r] = rows;
    by_rank.items.at_source[r] = items;
  }
}

// begin[1..R] hold counts, and then where they end.
__device__ inline void scan_cut(ListCut& cut, int num_ranks) {
  int32_t running = cut.begin[0] = 0;
  for (int r = 1; r <= num_ranks; ++r) cut.begin[r] = running += cut.begin[r];
}

// Computes the block's offsets, and the verdict, from the counts of all ranks. False: the kernel is
// to end.
__device__ inline bool compute_offsets(const NotifyArgs& args, CountMatrix& matrix,
                                       const Offsets& offsets, RankCounts& by_rank) {
  const int experts = args.comm.num_experts, local = experts / args.comm.num_ranks;
  add_expert_counts(args, matrix, offsets);
  add_rank_counts(args.comm, matrix, offsets, by_rank);
  if (__syncthreads_and(matrix.complete()) == 0) return false;
  if (threadIdx.x == kNotifyThreads - 32) scan_cut(by_rank.rows, args.comm.num_ranks);
  if (threadIdx.x == kNotifyThreads - 64) scan_cut(by_rank.items, args.comm.num_ranks);
  if (args.blocks_per_expert > 1) pad_blocks(args, offsets.scan);
  block_exclusive_scan<kNotifyThreads>(offsets.scan, experts);
  for (int e = threadIdx.x; e < experts; e += kNotifyThreads) {
    offsets.base[e] += offsets.scan[e] - offsets.scan[e / local * local];
  }
  if (threadIdx.x < 32) judge(args, offsets.scan, by_rank);
  __syncthreads();
  return true;
}

}  // namespace moe_ep
