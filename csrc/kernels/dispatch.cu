// dispatch of rows as they are. Every rank pulls the rows it is to have from where the others have
// staged them, each once, and stores each to all its expert rows. Its own rows need no staging.
#include "device/staging.cuh"
#include "kernels/dispatch.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 768;
constexpr int kThreadsStaged = 512;  // more of them slow each other down where ranks share memory

// Where a source's rows are to be read.
struct SourceRows {
  const char* rows;    // [T, H]; null: the kernel is to end
  const float* probs;  // [T, K] or null
};

__device__ __forceinline__ SourceRows source_rows(const DispatchArgs& args, const StagingSlot& slot,
                                                  int source, PeerGate& gate) {
  const CommView& comm = args.comm;
  if (source == comm.rank && !args.own_staged) return {args.x, args.probs};
  if (!gate.wait(comm, Signal::kStageReady, source, slot.operation, Phase::kStageReady)) {
    return {nullptr, nullptr};
  }
  const StagedRows stage = staged_rows(comm, slot, source);
  return {stage.rows, stage.probs};
}

__device__ __forceinline__ void pull_probs(const DispatchArgs& args, const SourceRows& from,
                                           const RankRowCursor& cursor, int lane) {
  if (args.row_probs == nullptr || cursor.piece() != 0 || lane >= cursor.row().item_count) return;
  args.row_probs[cursor.item().row] = from.probs[cursor.item().slot];
}

// Registers carry the rows; many warps keep the memory busy.
__device__ bool pull_rows(const DispatchArgs& args, const StagingSlot& slot, const int32_t* begin) {
  const RowShape& shape = args.shape;
  const int lane = threadIdx.x % kWarp;
  RankRowCursor cursor(args.comm, args.plan, begin, shape.pieces, args.comm.rank);
  PeerGate gate;
  while (cursor.advance()) {
    const SourceRows from = source_rows(args, slot, cursor.source(), gate);
    if (from.rows == nullptr) return false;
    const int vectors = shape.vectors_of(cursor.piece());
    const int64_t offset = shape.offset_of(cursor.piece());
    Piece piece;
    load_piece(piece, from.rows + cursor.row().token * shape.row_bytes + offset, vectors, lane);
    pull_probs(args, from, cursor, lane);
#pragma unroll 1
    for (int i = 0; i < cursor.row().item_count; ++i) {
      const int64_t row = __shfl_sync(0xffffffffu, cursor.item().row, i);
      store_piece(piece, args.rows + row * shape.row_bytes + offset, vectors, lane);
    }
  }
  return true;
}

__global__ void __launch_bounds__(kThreads, 1)
    dispatch_kernel(const __grid_constant__ DispatchArgs args) {
  __shared__ int32_t begin[kMaxRanks + 1];
  const CommView& comm = args.comm;
  if (is_aborted(comm)) return;
  const bool staged = comm.num_ranks > 1 || args.own_staged != 0;
  const StagingSlot slot = current_slot(comm);
  load_begin(comm, args.plan, begin);
  if (!pull_rows(args, slot, begin)) return;
  zero_padding(comm, args.plan, args.rows, args.shape.row_bytes, args.row_probs, nullptr, 0);
  finish_dispatch(comm, slot, staged);
}

}  // namespace

cudaError_t launch_dispatch(const DispatchArgs& args, int num_blocks, cudaStream_t stream) {
  const int threads = args.comm.num_ranks > 1 ? kThreadsStaged : kThreads;
  dispatch_kernel<<<num_blocks, threads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moe_ep
