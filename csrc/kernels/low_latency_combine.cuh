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

// What is sent, in shared memory: of the E segments (local expert, source rank), expert by expert.
struct Outgoing {
  int32_t begin[kMaxExperts + 1];  // the scanned lengths; 0 where nothing is sent
  int32_t first[kMaxExperts];      // place of the segment's first row among the expert's
};

// A row of the dispatch's result.
struct ExpertRow {
  int32_t expert, source;
  int32_t position;  // within the expert
  int32_t slot;      // token*K + k of the source
};

__device__ __forceinline__ ExpertRow find_row(const LowLatencyCombineArgs& args,
                                              const Outgoing& outgoing, int row) {
  const LowLatencyView& view = args.view;
  int low = 0, high = view.shape.num_experts;
  while (high - low > 1) {  // begin[low] <= row < begin[high]
    const int middle = (low + high) / 2;
    if (outgoing.begin[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const int expert = static_cast<int>(view.ranks.quotient(low));
  const int source = static_cast<int>(view.ranks.remainder(low, expert));
  const int position = outgoing.first[low] + row - outgoing.begin[low];
  const int64_t num_rows = static_cast<int64_t>(view.shape.num_ranks) * view.shape.max_tokens;
  return {expert, source, position, args.slots[expert * num_rows + position]};
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
    uint32_t seen;
    passed = poll(
        comm,
        [&] {
          seen = ptx::load_acquire_device(signal);
          return seen >= args.signal_value;
        },
        [&] {
          const uint64_t which = static_cast<uint64_t>(row.expert) << 32 | block;
          record_fault(comm, comm.rank, kPhaseBlockSignal, operation, which, seen);
        });
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

// kPlaceOwn where rows for this rank itself are not copied: they are summed in the same launch, and
// nobody has to wait until they may be read.
__device__ __forceinline__ uint32_t own_place(const LowLatencyCombineArgs& args) {
  const LowLatencyView& view = args.view;
  const int64_t num_rows = static_cast<int64_t>(view.shape.num_ranks) * view.shape.max_tokens;
  const bool stays =
      (view.parts & kReceive) != 0 && view.comm.bad_input == 0 && args.block_signals == nullptr;
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
                                            const LowLatencyBuffer& buffer,
                                            const Outgoing& outgoing, uint64_t operation) {
  const LowLatencyView& view = args.view;
  const RowShape& row_shape = args.send_shape;
  const int lane = threadIdx.x % kWarp;
  const int64_t num_rows = static_cast<int64_t>(view.shape.num_ranks) * view.shape.max_tokens;
  const int total = outgoing.begin[view.shape.num_experts] * row_shape.pieces;
  int u = first_unit();
  ExpertRow next{};
  if (u < total) next = find_row(args, outgoing, args.send_pieces.quotient(u));
#pragma unroll 1
  for (; u < total; u += unit_step()) {
    const ExpertRow row = next;
    const int number = static_cast<int>(args.send_pieces.quotient(u));
    const int piece_index = static_cast<int>(args.send_pieces.remainder(u, number));
    if (args.block_signals != nullptr && !wait_block_signal(args, row, operation)) return false;
    const int vectors = row_shape.vectors_of(piece_index);
    const int64_t offset = row_shape.offset_of(piece_index);
    const char* x = args.x + (row.expert * num_rows + row.position) * row_shape.row_bytes;
    const bool near = is_near<Link>(view, row.source);
    Piece piece;
    if (near) load_piece_once(piece, x + offset, vectors, lane);
    if (u + unit_step() < total) {
      next = find_row(args, outgoing, args.send_pieces.quotient(u + unit_step()));
    }
    if constexpr (Link::kBorder) {
      if (!near) {
        if (piece_index == 0) put_row<Link>(args, buffer, row, x, number);
        continue;
      }
    }
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
    uint64_t* word = word_at(view, peer, buffer.places, comm.rank * local + expert);
    const uint64_t value = ready_word(operation, view.tag, comm.bad_input != 0, place);
    if (in_place) {
      release_word<Link>(view, word, value);  // after the rows, written before this launch
    } else {
      ptx::store_relaxed_system(word, value);
    }
  }
}

// Called by all threads; a barrier must follow.
template <typename Link>
__device__ __forceinline__ void load_lengths(const LowLatencyCombineArgs& args,
                                             Outgoing& outgoing) {
  const LowLatencyView& view = args.view;
  const bool own_stays = own_place(args) != 0;
  for (int i = threadIdx.x; i < args.view.shape.num_experts; i += kLowLatencyThreads) {
    const int64_t range = args.layout_range[i];
    const int source = static_cast<int>(view.ranks.remainder(i, view.ranks.quotient(i)));
    const bool stays = (own_stays && source == view.comm.rank) ||
                       (args.expert_out != 0 && is_near<Link>(view, source));
    outgoing.first[i] = static_cast<int32_t>(range >> 32);
    outgoing.begin[i] = stays ? 0 : static_cast<int32_t>(range);
  }
}

template <typename Link>
__device__ bool send(const LowLatencyCombineArgs& args, const LowLatencyBuffer& buffer,
                     Outgoing& outgoing, uint64_t operation, bool aborted) {
  const LowLatencyView& view = args.view;
  load_lengths<Link>(args, outgoing);
  const bool goes_on = !aborted && poll_buffer_free(view, operation);
  if (__syncthreads_and(goes_on) == 0) return false;
  if (blockIdx.x == 0) signal_places<Link>(args, buffer, operation);
  if (view.comm.bad_input != 0) return true;
  if (args.expert_out != 0) {  // nothing is written: the peers of this host come for the rows
    uint64_t* last_use = view.comm.control->stage_operation + args.expert_out - 1;
    if (blockIdx.x == 0 && threadIdx.x == 0) *last_use = operation;
    if (!Link::kBorder) return true;
    __threadfence_system();  // what reads the rows of other hosts may be a network card
  }
  block_exclusive_scan<kLowLatencyThreads>(outgoing.begin, view.shape.num_experts);
  const bool passed = return_rows<Link>(args, buffer, outgoing, operation);
  if (__syncthreads_and(passed) == 0) return false;
  if (args.expert_out == 0) signal_block<Link>(view, buffer.blocks, operation);
  return true;
}

// -- receive --------------------------------------------------------------------------------------

// What is to be summed for a token, by lane: lane k knows slot k.
struct Terms {
  int32_t expert;  // -1: nothing
  int32_t index;   // Route::index
  float weight;
};

__device__ __forceinline__ Terms load_terms(const LowLatencyCombineArgs& args, int u) {
  const LowLatencyShape& shape = args.view.shape;
  const int token = static_cast<int>(args.sum_pieces.quotient(u));
  const int lane = threadIdx.x % kWarp;
  if (lane >= shape.num_slots || token >= args.num_tokens) return {-1, 0, 0.0f};
  const int64_t slot = static_cast<int64_t>(token) * shape.num_slots + lane;
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
  const int total = args.num_tokens * row_shape.pieces;
  int u = first_unit();
  Terms next = load_terms(args, u);
  const Awaited awaited{buffer.places,      operation, kPhaseCombineReady, false, false,
                        args.waiting_stats, nullptr};
  if (!wait_for_senders<Link>(view, awaited, senders,
                              [&](int i, int place) { places[i] = place; })) {
    return false;
  }
#pragma unroll 1
  for (; u < total; u += unit_step()) {
    const Terms terms = next;
    next = load_terms(args, u + unit_step());
    const int64_t token = args.sum_pieces.quotient(u);
    const int piece_index = static_cast<int>(args.sum_pieces.remainder(u, token));
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
  __shared__ Outgoing outgoing;
  __shared__ int32_t places[kMaxExperts];
  __shared__ Senders senders;
  const LowLatencyView& view = args.view;
  const bool sends = (view.parts & kSend) != 0, receives = (view.parts & kReceive) != 0;
  ptx::wait_for_stream();
  const uint64_t operation = operation_of(view);
  const bool aborted = is_aborted(view.comm);
  if (aborted && !sends) return;
  const LowLatencyBuffer& buffer = buffer_of(view, operation);
  if (sends) {
    if (!send<Link>(args, buffer, outgoing, operation, aborted)) return;
    count_operation(view, operation);
  }
  if (!receives) return;
  if (!receive<Link>(args, buffer, places, senders, operation)) return;
  signal_received<Link>(view, operation);
}

}  // namespace moe_ep
