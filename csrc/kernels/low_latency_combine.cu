// Low-latency combine. Every rank writes the expert rows back to slot [token][k] of their source
// rank, which adds them up with their weights: in k order, in fp32, rounded once.
#include "kernels/low_latency_signals.cuh"

namespace moe_ep {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;

__device__ void return_rows(const LowLatencyCombineArgs& args, const RowShape& row_shape,
                            const LowLatencyBuffer& buffer, const int32_t* begin) {
  const LowLatencyView& view = args.view;
  const LowLatencyShape& shape = view.shape;
  const int lane = threadIdx.x % kWarp;
  const int64_t num_rows = static_cast<int64_t>(shape.num_ranks) * shape.max_tokens;
  const int64_t total = static_cast<int64_t>(begin[shape.num_experts]) * row_shape.pieces;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kLowLatencyWarps;
  int64_t u = static_cast<int64_t>(blockIdx.x) * kLowLatencyWarps + threadIdx.x / kWarp;
  for (; u < total; u += step) {
    const PackedRow row = find_row(begin, shape, static_cast<int>(u / row_shape.pieces));
    const int piece_index = static_cast<int>(u % row_shape.pieces);
    const int64_t from = row.expert * num_rows + row.position;
    const int64_t slot = args.slots[from];
    const int vectors = row_shape.vectors_of(piece_index);
    const int64_t offset = row_shape.offset_of(piece_index);
    Piece piece;
    load_piece(piece, args.x + from * row_shape.row_bytes + offset, vectors, lane);
    char* target = view.comm.peers[row.source] + buffer.rows + slot * row_shape.row_bytes;
    store_piece(piece, target + offset, vectors, lane);
  }
}

__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    combine_send_kernel(const __grid_constant__ LowLatencyCombineArgs args,
                        const __grid_constant__ RowShape row_shape) {
  __shared__ int32_t begin[kMaxExperts + 1];
  const LowLatencyView& view = args.view;
  const CommView& comm = view.comm;
  if (is_aborted(comm)) return;
  const uint64_t operation = comm.control->operation + 1;
  const LowLatencyBuffer& buffer = buffer_of(view, operation);
  const int experts = comm.bad_input != 0 ? 0 : view.shape.num_experts;
  for (int i = threadIdx.x; i <= view.shape.num_experts; i += kLowLatencyThreads) {
    begin[i] = i < experts ? static_cast<int32_t>(args.layout_range[i]) : 0;  // the lower half
  }
  if (!wait_buffer_free(view, operation)) return;  // also a barrier
  block_exclusive_scan<kLowLatencyThreads>(begin, view.shape.num_experts);
  return_rows(args, row_shape, buffer, begin);
  if (!arrive_last(&comm.control->arrived_stage)) return;
  if (threadIdx.x < comm.num_ranks) {
    const int peer = (comm.rank + threadIdx.x) % comm.num_ranks;
    ptx::store_release_system(word_at(view, peer, buffer.combine_ready, comm.rank),
                              ready_word(operation, view.tag, comm.bad_input != 0, 0));
  }
  if (threadIdx.x == 0) finish_send(view, operation, args.ticket);
}

// What is to be summed for a token: lane i < count holds the i-th used slot.
struct Terms {
  int32_t slot;
  float weight;
  int32_t count;
};

__device__ __forceinline__ Terms load_terms(const LowLatencyCombineArgs& args, int64_t token,
                                            int lane) {
  const LowLatencyShape& shape = args.view.shape;
  Terms terms{0, 0.0f, 0};
  const int64_t slot = token * shape.num_slots + lane;
  bool used = false;
  if (lane < shape.num_slots) {
    const int expert = load_expert(args.topk_idx, args.topk_is_64_bit != 0, slot);
    used = expert >= 0 && expert < shape.num_experts;
    terms.slot = static_cast<int32_t>(slot);
    terms.weight = args.topk_weights[slot];
  }
  const uint32_t lanes = __ballot_sync(kAllLanes, used);
  terms.count = __popc(lanes);
  const int from = lane < terms.count ? static_cast<int>(__fns(lanes, 0, lane + 1)) : 0;
  terms.slot = __shfl_sync(kAllLanes, terms.slot, from);
  terms.weight = __shfl_sync(kAllLanes, terms.weight, from);
  return terms;
}

__device__ void sum_tokens(const LowLatencyCombineArgs& args, const RowShape& row_shape,
                           const LowLatencyBuffer& buffer) {
  const CommView& comm = args.view.comm;
  const int lane = threadIdx.x % kWarp;
  const char* base = comm.peers[comm.rank] + buffer.rows;
  const int64_t total = static_cast<int64_t>(args.num_tokens) * row_shape.pieces;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kLowLatencyWarps;
  int64_t u = static_cast<int64_t>(blockIdx.x) * kLowLatencyWarps + threadIdx.x / kWarp;
#pragma unroll 1
  for (; u < total; u += step) {
    const int64_t token = u / row_shape.pieces;
    const int piece_index = static_cast<int>(u % row_shape.pieces);
    const int64_t offset = row_shape.offset_of(piece_index);
    const Terms terms = load_terms(args, token, lane);
    const RowSet rows{base + offset, row_shape.row_bytes, terms.slot, terms.weight, terms.count};
    sum_rows<__nv_bfloat16, true>(rows, args.out + token * row_shape.row_bytes + offset,
                                  row_shape.vectors_of(piece_index), lane);
  }
}

__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    combine_receive_kernel(const __grid_constant__ LowLatencyCombineArgs args,
                           const __grid_constant__ RowShape row_shape) {
  __shared__ Waited waited;
  const LowLatencyView& view = args.view;
  if (is_aborted(view.comm)) return;
  const uint64_t operation = *args.ticket;
  const LowLatencyBuffer& buffer = buffer_of(view, operation);
  if (!wait_words(view, buffer.combine_ready, view.comm.num_ranks, operation, kPhaseCombineReady,
                  waited, [](int, int) {})) {
    return;
  }
  add_waiting(view.comm, waited, args.waiting_stats);
  sum_tokens(args, row_shape, buffer);
  finish_receive(view, operation);
}

}  // namespace

cudaError_t launch_low_latency_combine_send(const LowLatencyCombineArgs& args, int num_blocks,
                                            cudaStream_t stream) {
  const RowShape shape = row_shape(args.view.layout.row_bytes);
  combine_send_kernel<<<num_blocks, kLowLatencyThreads, 0, stream>>>(args, shape);
  return cudaGetLastError();
}

cudaError_t launch_low_latency_combine_receive(const LowLatencyCombineArgs& args, int num_blocks,
                                               cudaStream_t stream) {
  const RowShape shape = row_shape(args.view.layout.row_bytes);
  combine_receive_kernel<<<num_blocks, kLowLatencyThreads, 0, stream>>>(args, shape);
  return cudaGetLastError();
}

}  // namespace moe_ep
