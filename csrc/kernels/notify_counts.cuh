// First part of notify: counting the slots of this rank, and the exchange of counts.
#pragma once

#include "device/grid.cuh"
#include "kernels/notify.h"

namespace moe_ep {

constexpr int kNotifyThreads = 512;
constexpr int kNotifyWarps = kNotifyThreads / 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct Range {
  int64_t begin, end;  // tokens
};

// The first blocks exchange counts. The others only stage.
__device__ __forceinline__ int counting_blocks() {
  return min(static_cast<int>(gridDim.x), kMaxNotifyBlocks);
}

// Block 0 sees to the header and the host. The tokens are for the others, where there are any.
__device__ __forceinline__ int first_token_block() { return gridDim.x > 1 ? 1 : 0; }

__device__ inline Range warp_range(int64_t num_tokens) {
  const int first_block = first_token_block();
  if (blockIdx.x < first_block) return {0, 0};
  const int64_t num_warps = static_cast<int64_t>(counting_blocks() - first_block) * kNotifyWarps;
  const int64_t per_warp = ceil_div(num_tokens, num_warps);
  const int64_t warp = (blockIdx.x - first_block) * kNotifyWarps + threadIdx.x / 32;
  const int64_t begin = min64(warp * per_warp, num_tokens);
  return {begin, min64(begin + per_warp, num_tokens)};
}

// The lanes whose value equals this lane's, among those that take part. Values have `bits` bits. (A
// few ballots; __match_any_sync takes longer the more different values there are.)
__device__ __forceinline__ uint32_t lanes_with_equal(int value, int bits, bool takes_part) {
  uint32_t lanes = __ballot_sync(kAllLanes, takes_part);
  for (int b = 0; b < bits; ++b) {
    const bool is_set = (value >> b & 1) != 0;
    const uint32_t set = __ballot_sync(kAllLanes, is_set);
    lanes &= is_set ? set : ~set;
  }
  return lanes;
}

// Bits of the numbers below `count`.
__device__ __forceinline__ int bits_below(int count) { return 32 - __clz(count - 1); }

constexpr int kStepsAhead = 8;  // whose slots are loaded at once

// Expert ids of a warp's next steps. A lane sees its own only.
struct SlotsAhead {
  int16_t expert[kStepsAhead][32];
};

// A warp's walk over its tokens, as many whole tokens at a time as fit: a lane per slot. All lanes
// walk together.
class SlotWalk {
 public:
  // again: the warp has walked before, and finds in `ahead` what it left there.
  __device__ __forceinline__ SlotWalk(const NotifyArgs& args, SlotsAhead& ahead, bool again)
      : args_(args), ahead_(ahead) {
    const int lane = threadIdx.x % 32, num_slots = args.plan.num_slots;
    const Range range = warp_range(args.plan.num_tokens);
    tokens_per_step_ = 32 / num_slots;
    const int token = lane / num_slots;
    first_lane_ = token * num_slots;
    has_slot_ = token < tokens_per_step_;
    token_ = range.begin + token - tokens_per_step_;  // before the first step
    end_ = range.end;
    next_begin_ = range.begin;
    slot_ = token_ * num_slots + lane - first_lane_;
    is_loaded_ = again && range.end - range.begin <= kStepsAhead * tokens_per_step_;
    experts_per_rank_ = args.comm.num_experts / args.comm.num_ranks;
    rank_bits_ = bits_below(args.comm.num_ranks);
  }

  __device__ __forceinline__ bool advance() {
    if (next_begin_ >= end_) return false;
    next_begin_ += tokens_per_step_;
    token_ += tokens_per_step_;
    slot_ += tokens_per_step_ * args_.plan.num_slots;
    if (step_ == 0 && !is_loaded_) {
      if (args_.topk_is_64_bit) {
        load_ahead(static_cast<const int64_t*>(args_.topk_idx));
      } else {
        load_ahead(static_cast<const int32_t*>(args_.topk_idx));
      }
    }
    expert_ = ahead_.expert[step_][threadIdx.x % 32];
    step_ = (step_ + 1) % kStepsAhead;
    destination_ = expert_ < 0 ? -1 : expert_ / experts_per_rank_;
    same_rank_ = lanes_with_equal(destination_, rank_bits_, expert_ >= 0);
    const uint32_t lower = (1u << (threadIdx.x % 32)) - 1;
    is_first_ = expert_ >= 0 && (same_rank_ & token_lanes() & lower) == 0;
    return true;
  }

  // The lane's slot: its token, its place in topk_idx, whether there is one in this step.
  __device__ __forceinline__ int64_t token() const { return token_; }
  __device__ __forceinline__ int64_t slot() const { return slot_; }
  __device__ __forceinline__ bool has_slot() const { return has_slot_ && token_ < end_; }
  // -1: the slot is unused, or there is none; -2: the index is bad.
  __device__ __forceinline__ int expert() const { return expert_; }
  __device__ __forceinline__ int destination() const { return destination_; }
  // Whether it is the first of its token for this destination.
  __device__ __forceinline__ bool is_first() const { return is_first_; }
  __device__ __forceinline__ int first_lane() const { return first_lane_; }
  // Lanes with the slots of the same token; used ones for the same destination.
  __device__ __forceinline__ uint32_t token_lanes() const {
    return kAllLanes >> (32 - args_.plan.num_slots) << first_lane_;
  }
  __device__ __forceinline__ uint32_t same_rank() const { return same_rank_; }

 private:
  template <typename Index>
  __device__ __forceinline__ void load_ahead(const Index* topk_idx) const {
    Index expert[kStepsAhead];
#pragma unroll
    for (int i = 0; i < kStepsAhead; ++i) {
      const bool is_there = has_slot_ && token_ + i * tokens_per_step_ < end_;
      const int64_t slot = slot_ + i * tokens_per_step_ * args_.plan.num_slots;
      expert[i] = is_there ? topk_idx[slot] : -1;
    }
#pragma unroll
    for (int i = 0; i < kStepsAhead; ++i) {
      const bool is_bad = expert[i] < -1 || expert[i] >= args_.comm.num_experts;
      ahead_.expert[i][threadIdx.x % 32] = static_cast<int16_t>(is_bad ? -2 : expert[i]);
    }
  }

  const NotifyArgs& args_;
  SlotsAhead& ahead_;
  int64_t token_, end_, next_begin_, slot_;
  int tokens_per_step_, first_lane_, experts_per_rank_, rank_bits_;
  int step_ = 0, expert_ = -1, destination_ = -1;
  bool has_slot_, is_loaded_, is_first_ = false;
  uint32_t same_rank_ = 0;
};

// Fills counters[warp][column] with this block's counts, scanned over its warps, and writes the
// block's totals to block_counts.
__device__ inline void count_slots(const NotifyArgs& args, SlotsAhead& ahead, int32_t* counters,
                                   int32_t* block_counts) {
  const int experts = args.comm.num_experts, ranks = args.comm.num_ranks;
  const int columns = count_columns(experts, ranks);
  for (int i = threadIdx.x; i < kNotifyWarps * columns; i += kNotifyThreads) counters[i] = 0;
  __syncthreads();
  int32_t* mine = counters + threadIdx.x / 32 * columns;
  for (SlotWalk walk(args, ahead, false); walk.advance();) {
    if (walk.expert() == -2) atomicAdd(&mine[bad_index_column(experts, ranks)], 1);
    if (walk.expert() < 0) continue;
    atomicAdd(&mine[walk.expert()], 1);
    atomicAdd(&mine[items_column(experts, ranks) + walk.destination()], 1);
    if (walk.is_first()) atomicAdd(&mine[rank_rows_column(experts) + walk.destination()], 1);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < columns; c += kNotifyThreads) {
    int32_t values[kNotifyWarps], running = 0;
#pragma unroll
    for (int w = 0; w < kNotifyWarps; ++w) values[w] = counters[w * columns + c];
#pragma unroll
    for (int w = 0; w < kNotifyWarps; ++w) {
      counters[w * columns + c] = running;
      running += values[w];
    }
    block_counts[static_cast<int64_t>(blockIdx.x) * columns + c] = running;
  }
}

// What the blocks before `end` have counted in column c.
__device__ __forceinline__ int32_t sum_blocks(const int32_t* block_counts, int columns, int c,
                                              int end) {
  constexpr int kLoads = 16;  // at once
  int32_t sum = 0;
  for (int first = 0; first < end; first += kLoads) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      sum += first + i < end ? block_counts[(first + i) * columns + c] : 0;
    }
  }
  return sum;
}

// Sends this rank's counts to every rank, as words {operation, value}.
__device__ inline void send_counts(const NotifyArgs& args, uint64_t operation,
                                   const int32_t* block_counts) {
  const CommView& comm = args.comm;
  const int experts = comm.num_experts, ranks = comm.num_ranks;
  const int columns = count_columns(experts, ranks);
  for (int c = threadIdx.x; c < columns; c += kNotifyThreads) {
    int32_t value = sum_blocks(block_counts, columns, c, counting_blocks());
    if (c == bad_index_column(experts, ranks)) value += comm.bad_input;
    if (c == num_tokens_column(experts, ranks)) {
      value = static_cast<int>(args.verdict != nullptr ? args.own_tokens : args.plan.num_tokens);
    }
    const uint64_t word = operation << 32 | static_cast<uint32_t>(value);
    for (int i = 0; i < ranks; ++i) {
      const int peer = (comm.rank + i) % ranks;
      uint64_t* counts = reinterpret_cast<uint64_t*>(comm.peers[peer] + comm.layout.counts);
      ptx::store_relaxed_system(counts + comm.rank * static_cast<int64_t>(columns) + c, word);
    }
  }
}

// Adds what the blocks before this one have counted.
__device__ inline void add_blocks_before(int32_t* counters, const int32_t* block_counts,
                                         int columns) {
  for (int c = threadIdx.x; c < columns; c += kNotifyThreads) {
    const int32_t before = sum_blocks(block_counts, columns, c, static_cast<int>(blockIdx.x));
#pragma unroll
    for (int w = 0; w < kNotifyWarps; ++w) counters[w * columns + c] += before;
  }
}

// Waits for a word of `operation`; another one comes back after a fault.
static __device__ __noinline__ uint64_t wait_count(const CommView& comm, const uint64_t* address,
                                                   uint64_t operation, int source) {
  uint64_t word = ptx::load_relaxed_system(address);
  for (Deadline deadline; word >> 32 != static_cast<uint32_t>(operation);
       word = ptx::load_relaxed_system(address)) {
    if (!deadline.expired(comm, comm.timeout_ns)) continue;
    word = ptx::load_relaxed_system(address);  // the last look
    if (word >> 32 == static_cast<uint32_t>(operation)) break;
    record_fault(comm, source, Phase::kCounts, operation, operation << 32, word);
    break;
  }
  return word;
}

// The counts of all ranks [R][count_columns], as they arrive in this rank's memory. Every block
// reads them for itself: a word tells by its operation whether it is there.
class CountMatrix {
 public:
  __device__ __forceinline__ CountMatrix(const CommView& comm, uint64_t operation)
      : comm_(comm),
        operation_(operation),
        columns_(count_columns(comm.num_experts, comm.num_ranks)),
        words_(reinterpret_cast<const uint64_t*>(comm.peers[comm.rank] + comm.layout.counts)) {}

  __device__ __forceinline__ uint64_t load(int source, int column) const {
    return ptx::load_relaxed_system(at(source, column));
  }
  __device__ __forceinline__ bool is_there(uint64_t word) const {
    return word >> 32 == static_cast<uint32_t>(operation_);
  }
  // The count in a word that was loaded, waited for if it had not arrived.
  __device__ __forceinline__ int32_t value(uint64_t word, int source, int column) {
    if (!is_there(word)) {
      word = wait_count(comm_, at(source, column), operation_, source);
      complete_ = complete_ && is_there(word);
    }
    return static_cast<int32_t>(word);
  }
  // Whether all that this thread has waited for has come. Else the kernel is to end.
  __device__ __forceinline__ bool complete() const { return complete_; }

 private:
  __device__ __forceinline__ const uint64_t* at(int source, int column) const {
    return words_ + source * static_cast<int64_t>(columns_) + column;
  }

  const CommView& comm_;
  uint64_t operation_;
  int columns_;
  const uint64_t* words_;
  bool complete_ = true;
};

// Waits until the ranks have sent their counts. One word tells for its row: all are sent at once,
// and what should still be on its way is waited for when it is read. Block 0 tells the host who
// came last (without the time in which it staged, if it is the only block). Called by all threads;
// false: the kernel is to end.
__device__ inline bool wait_for_counts(const CommView& comm, CountMatrix& matrix) {
  __shared__ unsigned long long slowest;  // nobody: all were there before this rank's own were sent
  if (threadIdx.x == 0) slowest = pack_wait(0, comm.rank);
  __syncthreads();
  const int column = num_tokens_column(comm.num_experts, comm.num_ranks);
  for (int r = threadIdx.x; r < comm.num_ranks; r += kNotifyThreads) {
    const uint64_t begin = ptx::global_nanoseconds();
    const uint64_t word = matrix.load(r, column);
    if (matrix.is_there(word)) continue;
    matrix.value(word, r, column);
    if (blockIdx.x == 0) atomicMax(&slowest, pack_wait(ptx::global_nanoseconds() - begin, r));
  }
  const bool complete = __syncthreads_and(matrix.complete()) != 0;
  if (blockIdx.x == 0 && threadIdx.x == 0) comm.host->slowest_peer = slowest;
  return complete;
}

}  // namespace moe_ep
