// dispatch of rows that were staged as FP8: turned back at the receiver unless the caller wants
// them as they travelled. A rank's own rows go the same way, so that a result does not depend on
// which rank computed it.
//
// Where values are computed a lane works on 8 columns at a time, and 16 lanes share a scale.
#include "device/staging.cuh"
#include "kernels/by_type.cuh"
#include "kernels/dispatch.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 640;

template <typename T>
__device__ __forceinline__ void store_columns(T* target, const float (&f)[kFp8Columns]) {
  constexpr int kVectors = kFp8Columns / kPerVector<T>;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float part[kPerVector<T>];
#pragma unroll
    for (int j = 0; j < kPerVector<T>; ++j) part[j] = f[i * kPerVector<T> + j];
    ptx::store_row16(target + i * kPerVector<T>, pack(part, T()));
  }
}

// A piece of an FP8 row in registers, with the scale of each of the lane's vectors.
struct Fp8Piece {
  uint2 q[kVectorsPerLane];
  float scale[kVectorsPerLane];
};

__device__ __forceinline__ void load_fp8_piece(Fp8Piece& piece, const char* row,
                                               const float* scales, int first_vector, int vectors,
                                               int lane) {
#pragma unroll
  for (int i = 0; i < kVectorsPerLane; ++i) {
    const int index = i * kWarp + lane;
    piece.q[i] = make_uint2(0, 0);
    piece.scale[i] = 0.0f;
    if (index >= vectors) continue;
    const int vector = first_vector + index;
    piece.q[i] = ptx::load_row8(row + vector * kFp8Columns);
    piece.scale[i] = scales[vector / kLanesPerScale];
  }
}

// Turns one vector of the piece back and stores it to every expert row of the rank row.
template <typename T>
__device__ __forceinline__ void store_dequantized(T* column, int64_t hidden, const uint2& q,
                                                  float scale, int item_row, int count,
                                                  bool inside) {
  const uint32_t words[2] = {q.x, q.y};
  float f[kFp8Columns];
#pragma unroll
  for (int j = 0; j < kFp8Columns / 2; ++j) {
    const float2 pair = fp8_pair(words[j / 2] >> (j % 2 * 16));
    f[2 * j] = pair.x * scale;
    f[2 * j + 1] = pair.y * scale;
  }
#pragma unroll 1
  for (int n = 0; n < count; ++n) {
    const int64_t row = __shfl_sync(0xffffffffu, item_row, n);
    if (inside) store_columns(column + row * hidden, f);
  }
}

// One rank row's piece to its expert rows, in the type of x.
template <typename T>
__device__ __forceinline__ void move_dequantized(const DispatchArgs& args, const StagedRows& stage,
                                                 const RankRowCursor& cursor, int lane) {
  const int64_t token = cursor.row().token, hidden = args.hidden;
  const int first_vector = cursor.piece() * args.shape.piece_vectors;
  const int vectors = args.shape.vectors_of(cursor.piece());
  Fp8Piece piece;
  load_fp8_piece(piece, stage.rows + token * hidden, stage.scales + token * (hidden / kFp8Block),
                 first_vector, vectors, lane);
#pragma unroll
  for (int i = 0; i < kVectorsPerLane; ++i) {
    if (i * kWarp >= vectors) break;  // the same in all lanes
    const int index = i * kWarp + lane;
    T* column = reinterpret_cast<T*>(args.rows) + (first_vector + index) * kFp8Columns;
    store_dequantized(column, hidden, piece.q[i], piece.scale[i], cursor.item().row,
                      cursor.row().item_count, index < vectors);
  }
}

// The same for rows that stay as they travelled.
__device__ __forceinline__ void move_quantized(const DispatchArgs& args, const StagedRows& stage,
                                               const RankRowCursor& cursor, int lane) {
  const RowShape& shape = args.shape;
  const int64_t token = cursor.row().token;
  const int vectors = shape.vectors_of(cursor.piece());
  const int num_scales = args.hidden / kFp8Block;
  const int64_t offset = shape.offset_of(cursor.piece());
  Piece piece;
  load_piece(piece, stage.rows + token * shape.row_bytes + offset, vectors, lane);
#pragma unroll 1
  for (int n = 0; n < cursor.row().item_count; ++n) {
    const int64_t row = __shfl_sync(0xffffffffu, cursor.item().row, n);
    store_piece(piece, args.rows + row * shape.row_bytes + offset, vectors, lane);
  }
  if (cursor.piece() != 0) return;
  for (int first = 0; first < num_scales; first += kWarp) {
    const int i = first + lane;
    const float scale = i < num_scales ? stage.scales[token * num_scales + i] : 0.0f;
#pragma unroll 1
    for (int n = 0; n < cursor.row().item_count; ++n) {
      const int64_t row = __shfl_sync(0xffffffffu, cursor.item().row, n);
      if (i < num_scales) args.row_scales[row * num_scales + i] = scale;
    }
  }
}

template <typename T, bool kDequantize>
__device__ bool pull_rows(const DispatchArgs& args, const StagingSlot& slot, const int32_t* begin) {
  const CommView& comm = args.comm;
  const int lane = threadIdx.x % kWarp;
  RankRowCursor cursor(comm, args.plan, begin, args.shape.pieces, comm.rank);
  PeerGate gate;
#pragma unroll 1
  while (cursor.advance()) {
    const int source = cursor.source();
    if (!gate.wait(comm, Signal::kStageReady, source, slot.operation, Phase::kStageReady)) {
      return false;
    }
    const StagedRows stage = staged_rows(comm, slot, source);
    if (args.row_probs != nullptr && cursor.piece() == 0 && lane < cursor.row().item_count) {
      args.row_probs[cursor.item().row] = stage.probs[cursor.item().slot];
    }
    if constexpr (kDequantize) {
      move_dequantized<T>(args, stage, cursor, lane);
    } else {
      move_quantized(args, stage, cursor, lane);
    }
  }
  return true;
}

template <typename T, bool kDequantize>
__global__ void __launch_bounds__(kThreads, 1)
    dispatch_fp8_kernel(const __grid_constant__ DispatchArgs args) {
  __shared__ int32_t begin[kMaxRanks + 1];
  const CommView& comm = args.comm;
  if (is_aborted(comm)) return;
  const StagingSlot slot = current_slot(comm);
  load_begin(comm, args.plan, begin);
  if (!pull_rows<T, kDequantize>(args, slot, begin)) return;
  const int64_t row_bytes =
      args.hidden * static_cast<int64_t>(kDequantize ? sizeof(T) : sizeof(uint8_t));
  zero_padding(comm, args.plan, args.rows, row_bytes, args.row_probs, args.row_scales,
               args.hidden / kFp8Block);
  finish_dispatch(comm, slot, true);
}

}  // namespace

cudaError_t launch_dispatch_fp8(const DispatchArgs& args, int num_blocks, cudaStream_t stream) {
  if (args.row_scales != nullptr) {
    dispatch_fp8_kernel<uint8_t, false><<<num_blocks, kThreads, 0, stream>>>(args);
    return cudaGetLastError();
  }
  return launch_by_type(args.type, [&](auto zero) {
    dispatch_fp8_kernel<decltype(zero), true><<<num_blocks, kThreads, 0, stream>>>(args);
  });
}

}  // namespace moe_ep
