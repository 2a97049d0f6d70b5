// A warp's walk over the rank rows of a plan, source by source, with the metadata of the next two
// pieces already on its way.
#pragma once

#include "device/wait.cuh"
#include "shared/plan_layout.h"
#include "shared/row_shape.h"

namespace moe_ep {

// begin: the plan's rank_row_begin, in shared memory. All warps of the grid share the walk. It need
// not begin with 0: between hosts a plan is a part of a longer list.
class RankRowCursor {
 public:
  __device__ __forceinline__ RankRowCursor(const CommView& comm, const PlanView& plan,
                                           const int32_t* begin, int pieces, int first_source)
      : plan_(plan), begin_(begin), num_ranks_(comm.num_ranks), pieces_(pieces) {
    const int warps = blockDim.x / kWarp;
    lane_ = threadIdx.x % kWarp;
    source_ = first_source;
    shift_ = begin[first_source];
    num_rows_ = begin[comm.num_ranks] - begin[0];
    end_ = begin[comm.num_ranks];
    total_ = num_rows_ * pieces;
    // Neighbouring warps of one block take neighbouring pieces.
    index_ = static_cast<int>(blockIdx.x) * warps + threadIdx.x / kWarp;
    step_ = static_cast<int>(gridDim.x) * warps;
    next_row_ = load_row(index_);
    next_item_ = load_item(next_row_, index_);
    after_row_ = load_row(index_ + step_);
  }

  // Moves to the next piece of this warp; false when there is none.
  __device__ __forceinline__ bool advance() {
    if (index_ >= total_) return false;
    row_ = next_row_;
    item_ = next_item_;
    place_ = place_of(index_);
    piece_ = index_ % pieces_;
    index_ += step_;
    next_row_ = after_row_;
    next_item_ = load_item(next_row_, index_);
    after_row_ = load_row(index_ + step_);
    while (place_ < begin_[source_] || place_ >= begin_[source_ + 1]) {
      source_ = source_ + 1 == num_ranks_ ? 0 : source_ + 1;
    }
    return true;
  }

  __device__ __forceinline__ const RankRow& row() const { return row_; }
  __device__ __forceinline__ const Item& item() const { return item_; }  // lane i holds item i
  __device__ __forceinline__ int piece() const { return piece_; }
  __device__ __forceinline__ int source() const { return source_; }

 private:
  __device__ __forceinline__ int place_of(int index) const {
    const int place = index / pieces_ + shift_;
    return place < end_ ? place : place - num_rows_;
  }
  __device__ __forceinline__ RankRow load_row(int index) const {
    return index < total_ ? plan_.rank_rows[place_of(index)] : RankRow{};
  }
  __device__ __forceinline__ Item load_item(const RankRow& row, int index) const {
    return index < total_ && lane_ < row.item_count ? plan_.items[row.item_begin + lane_] : Item{};
  }

  const PlanView& plan_;
  const int32_t* begin_;
  int num_ranks_, pieces_, lane_, source_, shift_, num_rows_, end_, place_ = 0, piece_ = 0;
  int total_, index_, step_;  // in pieces
  RankRow row_, next_row_, after_row_;
  Item item_, next_item_;
};

// Copies the plan's rank_row_begin to shared memory, followed by a barrier.
__device__ __forceinline__ void load_begin(const CommView& comm, const PlanView& plan,
                                           int32_t* begin) {
  const PlanHeader header = plan_header(comm.num_ranks, comm.num_experts / comm.num_ranks);
  for (int i = threadIdx.x; i <= comm.num_ranks; i += blockDim.x) {
    begin[i] = plan.header[header.rank_row_begin + i];
  }
  __syncthreads();
}

// A warp's knowledge of which peers have signalled: each is waited for once.
class PeerGate {
 public:
  // All lanes call it with the same peer. False: the kernel is to end.
  __device__ __forceinline__ bool wait(const CommView& comm, Signal kind, int peer,
                                       uint64_t operation, Phase phase) {
    if (peer == last_) return true;
    int passed = 0;
    if (threadIdx.x % kWarp == 0) passed = wait_signal(comm, kind, peer, operation, phase);
    last_ = peer;
    __syncwarp();  // orders the other lanes' reads after the acquire
    return __shfl_sync(0xffffffffu, passed, 0) != 0;
  }

 private:
  int last_ = -1;
};

// Waits for one signal of every peer. All threads of the block call it and get the same answer.
__device__ __forceinline__ bool wait_all_peers(const CommView& comm, Signal kind,
                                               uint64_t operation, Phase phase) {
  int passed = 1;
  if (threadIdx.x < comm.num_ranks) {
    const int peer = (comm.rank + threadIdx.x) % comm.num_ranks;
    passed = wait_signal(comm, kind, peer, operation, phase);
  }
  return __syncthreads_and(passed) != 0;
}

}  // namespace moe_ep
