// combine. Every rank sums the expert rows of each rank row and writes the partial sum into a slot
// of the source rank, which adds the slots of each token in a fixed order. In exact mode the slots
// hold expert rows and all is summed at the source, in k order: one rounding, more traffic. A rank
// alone sums its expert rows directly.
#include "device/cursor.cuh"
#include "device/grid.cuh"
#include "device/rows.cuh"
#include "kernels/by_type.cuh"
#include "kernels/combine.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 512;

// From an item's index in this rank's plan to its index in what its source rank published, which is
// its combine slot in exact mode. Called by all threads of the block, followed by a barrier.
__device__ void load_item_shifts(const CombineArgs& args, int32_t* shifts) {
  const int ranks = args.comm.num_ranks;
  const PlanHeader at = plan_header(ranks, args.comm.num_experts / ranks);
  const int32_t* header = args.plan.header;
  for (int i = threadIdx.x; i < ranks; i += kThreads) {
    shifts[i] = header[at.source_item + i] - header[at.item_begin + i];
  }
  __syncthreads();
}

// Writes this rank's share of the sums into the slots of the source ranks.
template <typename T, bool kWeighted>
__device__ bool push_partials(const CombineArgs& args, const int32_t* begin,
                              const int32_t* item_shifts) {
  const CommView& comm = args.comm;
  const RowShape& shape = args.shape;
  const int lane = threadIdx.x % kWarp;
  const uint64_t last = comm.control->combine_operation;
  // Starting with the next rank: no two ranks write to the same one at first.
  const int first_source = (comm.rank + 1) % comm.num_ranks;
  RankRowCursor cursor(comm, args.plan, begin, shape.pieces, first_source);
  PeerGate gate;
#pragma unroll 1
  while (cursor.advance()) {
    const int source = cursor.source();
    if (!gate.wait(comm, Signal::kCombineDone, source, last, Phase::kSlotsFree)) return false;
    char* peer = comm.peers[source];
    const int vectors = shape.vectors_of(cursor.piece());
    const int64_t offset = shape.offset_of(cursor.piece());
    const int count = cursor.row().item_count;
    const Item item = cursor.item();
    const bool holds_item = lane < count;
    char* slots = peer + comm.layout.slots + offset;
    if (cursor.piece() == 0 && holds_item) {
      if (args.values != nullptr) {
        reinterpret_cast<float*>(peer + comm.layout.slot_values)[item.slot] = args.values[item.row];
      }
      if (kWeighted && args.exact) {
        reinterpret_cast<float*>(peer + comm.layout.slot_weights)[item.slot] =
            args.weights[item.row];
      }
    }
    if (args.exact) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const int64_t row = __shfl_sync(0xffffffffu, item.row, i);
        const int64_t slot = cursor.row().item_begin + i + item_shifts[source];
        Piece piece;
        load_piece(piece, args.rows + row * shape.row_bytes + offset, vectors, lane);
        store_piece(piece, slots + slot * shape.row_bytes, vectors, lane);
      }
    } else {
      const float weight = kWeighted && holds_item ? args.weights[item.row] : 0.0f;
      const RowSet rows{args.rows + offset, shape.row_bytes, item.row, weight, count};
      sum_rows<T, kWeighted>(rows, slots + cursor.row().slot * shape.row_bytes, vectors, lane);
    }
  }
  return true;
}

// What is to be summed for one token: lane i holds term i.
struct Terms {
  int32_t row;  // -1 in lanes without one
  float weight;
};

// Moves the lanes that hold a term to the front and returns their number.
__device__ __forceinline__ int compact(Terms& terms) {
  const uint32_t used = __ballot_sync(0xffffffffu, terms.row >= 0);
  const int count = __popc(used);
  if (used == (count == 32 ? 0xffffffffu : (1u << count) - 1)) return count;
  const int lane = threadIdx.x % kWarp;
  const int from = lane < count ? __fns(used, 0, lane + 1) : 0;
  terms.row = __shfl_sync(0xffffffffu, terms.row, from);
  terms.weight = __shfl_sync(0xffffffffu, terms.weight, from);
  return count;
}

template <bool kWeighted>
__device__ __forceinline__ Terms load_terms(const CombineArgs& args, int64_t token, int lane) {
  const CommView& comm = args.comm;
  const PlanView& plan = args.plan;
  Terms terms{-1, 0.0f};
  if (token >= plan.num_tokens) return terms;
  if (comm.num_ranks > 1 && !args.exact) {
    const int destinations = max_destinations(comm.max_slots, comm.num_ranks);
    if (lane < plan.num_partials[token]) {
      terms.row = plan.partial_slots[token * destinations + lane];
      terms.weight = 1.0f;  // partial sums have their weights already
    }
    return terms;
  }
  if (lane >= plan.num_slots) return terms;
  const int64_t slot = token * plan.num_slots + lane;
  terms.row = plan.row_of_slot[slot];
  if (terms.row < 0) return terms;
  const float* weights = args.weights + terms.row;
  if (comm.num_ranks > 1) {
    terms.row = plan.item_of_slot[slot];
    weights =
        reinterpret_cast<const float*>(comm.peers[comm.rank] + comm.layout.slot_weights) + slot;
  }
  if (kWeighted) terms.weight = *weights;
  return terms;
}

// Sums each token's terms into the result.
template <typename T, bool kWeighted>
__device__ void sum_tokens(const CombineArgs& args) {
  const CommView& comm = args.comm;
  const RowShape& shape = args.shape;
  const int lane = threadIdx.x % kWarp;
  const int total = static_cast<int>(args.plan.num_tokens) * shape.pieces;
  const int step = static_cast<int>(gridDim.x) * (kThreads / kWarp);
  const bool alone = comm.num_ranks == 1;
  const char* base = alone ? args.rows : comm.peers[comm.rank] + comm.layout.slots;
  int index = static_cast<int>(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp;
  Terms next = load_terms<kWeighted>(args, index / shape.pieces, lane);
#pragma unroll 1
  for (; index < total; index += step) {
    const int64_t token = index / shape.pieces;
    const int piece = index % shape.pieces;
    Terms terms = next;
    next = load_terms<kWeighted>(args, (index + step) / shape.pieces, lane);
    const int count = compact(terms);
    const int64_t offset = shape.offset_of(piece);
    const RowSet rows{base + offset, shape.row_bytes, terms.row, terms.weight, count};
    char* target = args.out + token * shape.row_bytes + offset;
    sum_rows<T, kWeighted>(rows, target, shape.vectors_of(piece), lane);
  }
}

// Brings the carried values into [T, K], zero where a slot is unused.
__device__ void collect_values(const CombineArgs& args) {
  const CommView& comm = args.comm;
  const int64_t total = args.plan.num_tokens * args.plan.num_slots;
  const float* arrived =
      reinterpret_cast<const float*>(comm.peers[comm.rank] + comm.layout.slot_values);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * kThreads) {
    const int32_t row = args.plan.row_of_slot[i];
    const float* value = comm.num_ranks == 1 ? args.values + row : arrived + i;
    args.slot_values[i] = row < 0 ? 0.0f : *value;
  }
}

template <typename T, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 1)
    combine_kernel(const __grid_constant__ CombineArgs args) {
  __shared__ int32_t begin[kMaxRanks + 1], item_shifts[kMaxRanks];
  const CommView& comm = args.comm;
  if (is_aborted(comm)) return;
  Control* control = comm.control;
  const uint64_t operation = control->operation + 1;
  const bool alone = comm.num_ranks == 1;
  if (!alone) {
    load_begin(comm, args.plan, begin);
    if (args.exact) load_item_shifts(args, item_shifts);
    if (!push_partials<T, kWeighted>(args, begin, item_shifts)) return;
    if (arrive_last(&control->arrived_stage) && threadIdx.x < kWarp) {
      signal_peers(comm, Signal::kCombineReady, signal_word(comm, operation), threadIdx.x);
    }
    if (!wait_all_peers(comm, Signal::kCombineReady, operation, Phase::kPartials)) return;
  }
  sum_tokens<T, kWeighted>(args);
  if (args.slot_values != nullptr) collect_values(args);
  if (!arrive_last(&control->arrived_end)) return;
  if (!alone && threadIdx.x < kWarp) {
    signal_peers(comm, Signal::kCombineDone, signal_word(comm, operation), threadIdx.x);
  }
  if (threadIdx.x != 0) return;
  control->operation = operation;
  if (!alone) control->combine_operation = operation;
}

}  // namespace

cudaError_t launch_combine(const CombineArgs& args, int num_blocks, cudaStream_t stream) {
  return launch_by_type(args.type, [&](auto zero) {
    using T = decltype(zero);
    if (args.weights != nullptr) {
      combine_kernel<T, true><<<num_blocks, kThreads, 0, stream>>>(args);
    } else {
      combine_kernel<T, false><<<num_blocks, kThreads, 0, stream>>>(args);
    }
  });
}

}  // namespace moe_ep
