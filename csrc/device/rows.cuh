// Moving and summing pieces of rows, one warp at a time. A lane has eight 16-byte loads in flight
// whatever it does: of one row, or of up to eight rows that are to be summed.
#pragma once

#include "device/numeric.cuh"
#include "device/ptx.cuh"
#include "shared/row_shape.h"

namespace moe_ep {

// A register that is only sometimes loaded would stay occupied around the caller's loop.
__device__ __forceinline__ uint4 load_or_zero(const char* address, bool wanted) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (wanted) v = ptx::load_row16(address);
  return v;
}

struct Piece {
  uint4 v[kVectorsPerLane];
};

__device__ __forceinline__ void load_piece(Piece& piece, const char* source, int vectors,
                                           int lane) {
#pragma unroll
  for (int i = 0; i < kVectorsPerLane; ++i) {
    const int index = i * kWarp + lane;
    piece.v[i] = load_or_zero(source + index * kVectorBytes, index < vectors);
  }
}

__device__ __forceinline__ void store_piece(const Piece& piece, char* target, int vectors,
                                            int lane) {
#pragma unroll
  for (int i = 0; i < kVectorsPerLane; ++i) {
    const int index = i * kWarp + lane;
    if (index < vectors) ptx::store_row16(target + index * kVectorBytes, piece.v[i]);
  }
}

__device__ __forceinline__ void zero_bytes(char* target, int64_t bytes, int lane) {
#pragma unroll 1
  for (int64_t at = lane * kVectorBytes; at < bytes; at += kWarp * kVectorBytes) {
    ptx::store_row16(target + at, make_uint4(0, 0, 0, 0));
  }
}

// Rows to be summed: lane i knows row i and its weight. `count` <= 32 is the same in all lanes. Any
// type with `at`, `weight_of`, `load` and `count` will do below.
struct RowSet {
  const char* base;  // of row 0, at the first byte of the piece
  int64_t row_bytes;
  int32_t row;   // this lane's
  float weight;  // this lane's
  int32_t count;

  __device__ __forceinline__ const char* at(int i) const {
    return base + static_cast<int64_t>(__shfl_sync(0xffffffffu, row, i)) * row_bytes;
  }
  __device__ __forceinline__ float weight_of(int i) const {
    return __shfl_sync(0xffffffffu, weight, i);
  }
  __device__ __forceinline__ uint4 load(const char* address, bool wanted) const {
    return load_or_zero(address, wanted);
  }
};

template <typename T, bool kWeighted>
__device__ __forceinline__ void add_vector(float (&sum)[kPerVector<T>], const uint4& v,
                                           float weight) {
  float f[kPerVector<T>];
  unpack(v, f, T());
#pragma unroll
  for (int j = 0; j < kPerVector<T>; ++j) {
    sum[j] = kWeighted ? fmaf(f[j], weight, sum[j]) : sum[j] + f[j];
  }
}

// Sums kRows rows, as many vectors of each at a time as make about eight loads.
template <typename T, bool kWeighted, int kRows, typename Rows>
__device__ __forceinline__ void sum_few(const Rows& rows, char* target, int vectors, int lane) {
  constexpr int kUnroll = kVectorsPerLane / kRows;
  const char* at[kRows];
  float weight[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    at[i] = rows.at(i);
    weight[i] = kWeighted ? rows.weight_of(i) : 1.0f;
  }
#pragma unroll 1  // more of it in flight would spill
  for (int first = lane; first < vectors; first += kWarp * kUnroll) {
    uint4 v[kUnroll][kRows];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int index = first + u * kWarp;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        v[u][i] = rows.load(at[i] + index * kVectorBytes, index < vectors);
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int index = first + u * kWarp;
      if (index >= vectors) continue;
      float sum[kPerVector<T>] = {};
#pragma unroll
      for (int i = 0; i < kRows; ++i) add_vector<T, kWeighted>(sum, v[u][i], weight[i]);
      ptx::store_row16(target + index * kVectorBytes, pack(sum, T()));
    }
  }
}

// Sums any number of rows, eight at a time.
template <typename T, bool kWeighted, typename Rows>
__device__ __forceinline__ void sum_many(const Rows& rows, char* target, int vectors, int lane) {
  constexpr int kGroup = 8;
#pragma unroll 1
  for (int first = 0; first < vectors; first += kWarp) {
    const int index = first + lane;
    float sum[kPerVector<T>] = {};
#pragma unroll 1
    for (int begin = 0; begin < rows.count; begin += kGroup) {
      uint4 v[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const bool wanted = begin + i < rows.count;
        const char* at = rows.at(wanted ? begin + i : 0);
        v[i] = rows.load(at + index * kVectorBytes, wanted && index < vectors);
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (begin + i >= rows.count) continue;
        const float weight = kWeighted ? rows.weight_of(begin + i) : 1.0f;
        add_vector<T, kWeighted>(sum, v[i], weight);
      }
    }
    if (index < vectors) ptx::store_row16(target + index * kVectorBytes, pack(sum, T()));
  }
}

// target = sum of the rows in order, in fp32, rounded once. A single row is copied as it is.
template <typename T, bool kWeighted, typename Rows>
__device__ __forceinline__ void sum_rows(const Rows& rows, char* target, int vectors, int lane) {
  if (rows.count == 1 && !kWeighted) {
    Piece piece;
    load_piece(piece, rows.at(0), vectors, lane);
    store_piece(piece, target, vectors, lane);
    return;
  }
  switch (rows.count) {
    case 0:
      return zero_bytes(target, static_cast<int64_t>(vectors) * kVectorBytes, lane);
    case 1:
      return sum_few<T, kWeighted, 1>(rows, target, vectors, lane);
    case 2:
      return sum_few<T, kWeighted, 2>(rows, target, vectors, lane);
    case 3:
      return sum_few<T, kWeighted, 3>(rows, target, vectors, lane);
    case 4:
      return sum_few<T, kWeighted, 4>(rows, target, vectors, lane);
    case 5:
      return sum_few<T, kWeighted, 5>(rows, target, vectors, lane);
    case 6:
      return sum_few<T, kWeighted, 6>(rows, target, vectors, lane);
    case 7:
      return sum_few<T, kWeighted, 7>(rows, target, vectors, lane);
    case 8:
      return sum_few<T, kWeighted, 8>(rows, target, vectors, lane);
    default:
      return sum_many<T, kWeighted>(rows, target, vectors, lane);
  }
}

}  // namespace moe_ep
