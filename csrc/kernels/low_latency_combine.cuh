// Low-latency combine. Every rank gives the expert rows back to their source rank, which adds them
// up with their weights: in k order, in fp32, rounded once. Rows are written to slot [token][k] of
// the source, or, where the experts left them in symmetric memory, read by it where they are. Rows
// of a rank for itself stay where they are, too, if it sums them in the same launch. Rows for ranks
// of other hosts (a Link with a border) are put to the same slots.
#pragma once

#include "kernels/low_latency_put.cuh"

namespace moe_ep {

__device__ __forceinline__ uint4 load_or_zero_once(const char* address, bool wanted) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (wanted) v = ptx::load_row16_evict_first(address);
  return v;
}

// -- send -----------------------------------------------------------------------------------------

// A row of the dispatch's result.
struct ExpertRow {
  int32_t expert, source;
  int32_t position;  // within the expert
  int32_t slot;      // token*K + k of the source
};

// begin: the scanned lengths of the E segments (local expert, source rank), expert by expert.
__device__ __forceinline__ ExpertRow find_row(const LowLatencyCombineArgs& args,
                                              const int32_t* begin, int row) {
  const LowLatencyShape& shape = args.view.shape;
  int low = 0, high = shape.num_experts;
  while (high - low > 1) {  // begin[low] <= row < begin[high]
    const int middle = (low + high) / 2;
    if (begin[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int expert = low / shape.num_ranks;
  const int position = row - begin[expert * shape.num_ranks];
  const int64_t num_rows = static_cast<int64_t>(shape.num_ranks) * shape.max_tokens;
  return {expert, low % shape.num_ranks, position, args.slots[expert * num_rows + position]};
}

// Waits until the caller has said that the row can be sent. All lanes of the warp call it.
__device__ __forceinline__ bool wait_block_signal(const LowLatencyCombineArgs& args,
                                                  const ExpertRow& row, uint64_t operation) {
  const CommView& comm = args.view.comm;
  const int64_t num_rows =
      static_cast<int64_t>(args.view.shape.num_ranks) * args.view.shape.max_tokens;
  const int64_t per_block = ceil_div(num_rows, args.blocks_per_expert);
  const int block = static_cast<int>(row.position / per_block);
  const uint32_t* signal = args.block_signals + row.expert * args.blocks_per_expert + block;
  bool passed = true;
  if (threadIdx.x % kWarp == 0) {
    uint32_t seen = ptx::load_acquire_device(signal);
    for (Deadline deadline; seen < args.signal_value; seen = ptx::load_acquire_device(signal)) {
      if (!deadline.expired(comm, comm.timeout_ns)) continue;
      seen = ptx::load_acquire_device(signal);  // the last look
      if (seen >= args.signal_value) break;
      const uint64_t which = static_cast<uint64_t>(row.expert) << 32 | block;
      record_fault(comm, comm.rank, kPhaseBlockSignal, operation, which, seen);
      passed = false;
      break;
    }
  }
  __syncwarp();  // the acquire of lane 0 is for all lanes
  return __shfl_sync(kAllLanes, passed, 0);
}

// As load_piece; nobody reads these bytes again.
__device__ __forceinline__ void load_piece_once(Piece& piece, const char* source, int vectors,
                                                int lane) {
#pragma unroll
  for (int i = 0; i < kVectorsPerLane; ++i) {
    const int index = i * kWarp + lane;
    piece.v[i] = load_or_zero_once(source + index * kVectorBytes, index < vectors);
  }
}

// kPlaceOwn where rows for this rank itself are not copied: they are summed in the same launch.
__device__ __forceinline__ uint32_t own_place(const LowLatencyCombineArgs& args) {
  const LowLatencyView& view = args.view;
  const int64_t num_rows = static_cast<int64_t>(view.shape.num_ranks) * view.shape.max_tokens;
  const bool stays = (view.parts & kReceive) != 0 && view.comm.bad_input == 0;
  return stays && num_rows <= kMaxPlaceBegin ? kPlaceOwn : 0;
}

// Puts a whole row to its source on another host. number: of the row. All lanes of the warp call
// it.
template <typename Link>
__device__ __forceinline__ void put_row(const LowLatencyCombineArgs& args,
                                        const LowLatencyBuffer& buffer, const ExpertRow& row,
                                        const char* x, int64_t number) {
  const LowLatencyView& view = args.view;
  const RowShape& row_shape = args.send_shape;
  const int lane = threadIdx.x % kWarp;
  if (args.expert_out == 0) {  // what is put must lie in symmetric memory
    char* copy = view.comm.peers[view.comm.rank] + buffer.returning + number * row_shape.row_bytes;
#pragma unroll 1
    for (int i = 0; i < row_shape.pieces; ++i) {
      Piece piece;
      load_piece_once(piece, x + row_shape.offset_of(i), row_shape.vectors_of(i), lane);
      store_piece(piece, copy + row_shape.offset_of(i), row_shape.vectors_of(i), lane);
    }
    __threadfence_system();
    __syncwarp();
    x = copy;
  }
  Link::put(view, row.source, buffer.rows + row.slot * row_shape.row_bytes, x, row_shape.row_bytes,
            buffer.arrived + view.comm.rank * 8);
  if (lane == 0) count_puts(view, 1, row_shape.row_bytes, 0);
}

// Writes the rows to their sources. False: the kernel is to end.
template <typename Link>
__device__ __forceinline__ bool return_rows(const LowLatencyCombineArgs& args,
                                            const LowLatencyBuffer& buffer, const int32_t* begin,
                                            uint64_t operation) {
  const LowLatencyView& view = args.view;
  const RowShape& row_shape = args.send_shape;
  const int lane = threadIdx.x % kWarp, pieces = row_shape.pieces;
  const int64_t num_rows = static_cast<int64_t>(view.shape.num_ranks) * view.shape.max_tokens;
  const int64_t total = static_cast<int64_t>(begin[view.shape.num_experts]) * pieces;
  int64_t u = first_unit();
  ExpertRow next{};
  if (u < total) next = find_row(args, begin, static_cast<int>(u / pieces));
  for (; u < total; u += unit_step()) {
    const ExpertRow row = next;
    if (u + unit_step() < total) {
      next = find_row(args, begin, static_cast<int>((u + unit_step()) / pieces));
    }
    if (args.block_signals != nullptr && !wait_block_signal(args, row, operation)) return false;
    if (row.source == view.comm.rank && own_place(args) != 0) continue;
    const int piece_index = static_cast<int>(u % pieces);
    const char* x = args.x + (row.expert * num_rows + row.position) * row_shape.row_bytes;
    if constexpr (Link::kBorder) {
      if (!is_near<Link>(view, row.source)) {
        if (piece_index == 0) put_row<Link>(args, buffer, row, x, u / pieces);
        continue;
      }
      if (args.expert_out != 0) continue;
    }
    const int vectors = row_shape.vectors_of(piece_index);
    const int64_t offset = row_shape.offset_of(piece_index);
    Piece piece;
    load_piece_once(piece, x + offset, vectors, lane);
    char* target = view.comm.peers[row.source] + buffer.rows + row.slot * row_shape.row_bytes;
    store_piece(piece, target + offset, vectors, lane);
  }
  return true;
}

// Tells every peer of this host where the rows of this rank's experts are or will be, and those of
// other hosts how many are put. Called by all threads of one block.
template <typename Link>
__device__ __forceinline__ void signal_places(const LowLatencyCombineArgs& args,
                                              const LowLatencyBuffer& buffer, uint64_t operation) {
  const LowLatencyView& view = args.view;
  const CommView& comm = view.comm;
  const bool in_place = args.expert_out != 0 && comm.bad_input == 0;
  signal_senders<Link>(view, operation, in_place || comm.bad_input != 0 ? 0 : gridDim.x, 0, false);
  const int ranks = comm.num_ranks, local = view.shape.num_experts / ranks;
  if constexpr (Link::kBorder) {
    signal_messages<Link>(view, operation, comm.bad_input != 0,
                          view.border->rank_messages[operation & 1], [&](int peer) {
                            int count = 0;
                            for (int e = 0; e < local && comm.bad_input == 0; ++e) {
                              count += static_cast<int32_t>(args.layout_range[e * ranks + peer]);
                            }
                            return count;
                          });
  }
  for (int i = threadIdx.x; i < view.shape.num_experts; i += kLowLatencyThreads) {
    const int peer = (comm.rank + i / local) % ranks, expert = i % local;
    uint32_t place = 0;
    if (!is_near<Link>(view, peer)) continue;  // it takes its own slots, once it has all messages
    const uint32_t source = in_place ? args.expert_out : peer == comm.rank ? own_place(args) : 0;
    if (source != 0) {
      const int64_t range = args.layout_range[expert * ranks + peer];
      place = row_place(source, static_cast<uint32_t>(range >> 32));
    }
    // In place, the rows are released by it: they were written before this launch.
    ptx::store_release_system(word_at(view, peer, buffer.places, comm.rank * local + expert),
                              ready_word(operation, view.tag, comm.bad_input != 0, place));
  }
}

// begin: shared memory [E + 1].
template <typename Link>
__device__ bool send(const LowLatencyCombineArgs& args, const LowLatencyBuffer& buffer,
                     int32_t* begin, uint64_t operation) {
  const LowLatencyView& view = args.view;
  const bool is_free = poll_buffer_free(view, operation);
  for (int i = threadIdx.x; i < view.shape.num_experts; i += kLowLatencyThreads) {
    begin[i] = static_cast<int32_t>(args.layout_range[i]);  // the lower half
  }
  if (__syncthreads_and(is_free) == 0) return false;
  if (blockIdx.x == 0) signal_places<Link>(args, buffer, operation);
  if (view.comm.bad_input != 0) return true;
  if (args.expert_out != 0) {  // nothing is written: the peers of this host come for the rows
    uint64_t* last_use = view.comm.control->stage_operation + args.expert_out - 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) *last_use = operation;
    if (!Link::kBorder) return true;
  }
  block_exclusive_scan<kLowLatencyThreads>(begin, view.shape.num_experts);
  const bool passed = return_rows<Link>(args, buffer, begin, operation);
  if (__syncthreads_and(passed) == 0) return false;
  if (args.expert_out == 0) signal_block<Link>(view, operation);
  return true;
}

// -- receive --------------------------------------------------------------------------------------

// What is to be summed for a token, by lane: lane k knows slot k.
struct Terms {
  int32_t expert;  // -1: nothing
  int32_t index;   // Route::index
  float weight;
};

__device__ __forceinline__ Terms load_terms(const LowLatencyCombineArgs& args, int64_t u) {
  const LowLatencyShape& shape = args.view.shape;
  const int64_t token = u / args.sum_shape.pieces;
  const int lane = threadIdx.x % kWarp;
  if (lane >= shape.num_slots || token >= args.num_tokens) return {-1, 0, 0.0f};
  const int64_t slot = token * shape.num_slots + lane;
  const int expert = load_expert(args.topk_idx, args.topk_is_64_bit != 0, slot);
  const int index = args.index[slot];
  const bool used = expert >= 0 && expert < shape.num_experts && index >= 0;
  return {used ? expert : -1, index, args.topk_weights[slot]};
}

// Rows to be summed: lane i < count knows where row i is, and its weight.
struct RowsAt {
  const char* address;
  float weight;
  int32_t count;

  __device__ __forceinline__ const char* at(int i) const {
    return reinterpret_cast<const char*>(
        __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(address), i));
  }
  __device__ __forceinline__ float weight_of(int i) const {
    return __shfl_sync(kAllLanes, weight, i);
  }
  // What the writers left in the L2 cache should stay there until it is read, and no longer.
  __device__ __forceinline__ uint4 load(const char* at, bool wanted) const {
    return load_or_zero_once(at, wanted);
  }
};

// places: shared memory [E], as the peers have signalled.
__device__ __forceinline__ RowsAt find_rows(const LowLatencyCombineArgs& args, const Terms& terms,
                                            const int32_t* places, uint64_t operation,
                                            int64_t token) {
  const LowLatencyView& view = args.view;
  const LowLatencyShape& shape = view.shape;
  const int lane = threadIdx.x % kWarp, local = shape.num_experts / shape.num_ranks;
  const char* address = nullptr;
  if (terms.expert >= 0) {
    const int place = places[terms.expert];
    const char* memory = view.comm.peers[view.comm.rank] + buffer_of(view, operation).rows;
    int64_t row = token * shape.num_slots + lane;
    const int source = place_source(place);
    if (source != 0) {
      const int64_t num_rows = static_cast<int64_t>(shape.num_ranks) * shape.max_tokens;
      const char* owner = view.comm.peers[terms.expert / local];
      memory = source == kPlaceOwn ? args.x : owner + view.layout.buffers[source - 1].expert_out;
      row = terms.expert % local * num_rows + place_begin(place) + terms.index;
    }
    address = memory + row * args.sum_shape.row_bytes;
  }
  const uint32_t used = __ballot_sync(kAllLanes, terms.expert >= 0);
  const int count = __popc(used);
  const int from = lane < count ? static_cast<int>(__fns(used, 0, lane + 1)) : 0;
  const RowsAt all{address, terms.weight, count};
  return {all.at(from), all.weight_of(from), count};
}

template <typename Link>
__device__ bool receive(const LowLatencyCombineArgs& args, const LowLatencyBuffer& buffer,
                        int32_t* places, Senders& senders, uint64_t operation) {
  const LowLatencyView& view = args.view;
  const RowShape& row_shape = args.sum_shape;
  const int64_t total = static_cast<int64_t>(args.num_tokens) * row_shape.pieces;
  int64_t u = first_unit();
  Terms next = load_terms(args, u);
  senders.waited.begin();
  if (!wait_words<Link>(view, buffer.places, operation, kPhaseCombineReady, senders, false,
                        [&](int i, int place) { places[i] = place; })) {
    return false;
  }
  if (!wait_blocks(view, operation, kPhaseCombineReady, senders)) return false;
  if constexpr (Link::kBorder) {
    if (!wait_messages(view, operation, kPhaseCombineReady, senders, false)) return false;
  }
  senders.waited.add_to(args.waiting_stats, view.comm.num_ranks);
#pragma unroll 1
  for (; u < total; u += unit_step()) {
    const Terms terms = next;
    next = load_terms(args, u + unit_step());
    const int64_t token = u / row_shape.pieces;
    const int piece_index = static_cast<int>(u % row_shape.pieces);
    const int64_t offset = row_shape.offset_of(piece_index);
    RowsAt rows = find_rows(args, terms, places, operation, token);
    rows.address += offset;
    sum_rows<__nv_bfloat16, true>(rows, args.out + token * row_shape.row_bytes + offset,
                                  row_shape.vectors_of(piece_index), threadIdx.x % kWarp);
  }
  return true;
}

template <typename Link>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    low_latency_combine_kernel(const __grid_constant__ LowLatencyCombineArgs args) {
  __shared__ int32_t by_expert[kMaxExperts + 1];
  __shared__ Senders senders;
  const LowLatencyView& view = args.view;
  ptx::wait_for_stream();
  const uint64_t operation = operation_of(view);
  if (is_aborted(view.comm)) return;
  const LowLatencyBuffer& buffer = buffer_of(view, operation);
  if ((view.parts & kSend) != 0 && !send<Link>(args, buffer, by_expert, operation)) return;
  __syncthreads();
  if ((view.parts & kReceive) != 0 && !receive<Link>(args, buffer, by_expert, senders, operation)) {
    return;
  }
  finish<Link>(view, operation);
}

}  // namespace moe_ep
