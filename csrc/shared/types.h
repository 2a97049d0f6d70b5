// Limits, element types and metadata records known to both host and device.
//
// Legend: T tokens of a rank, K slots per token (top-k times expert-tensor ranks), H hidden, R
// ranks of the group, L experts of one rank, E = R*L, N rows of a rank's result. A "rank row" is
// one (token, destination rank) pair: it travels once however many experts of that rank want it.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MOE_EP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define MOE_EP_HOST_DEVICE inline
#endif

namespace moe_ep {

constexpr int kMaxRanks = 64;
constexpr int kMaxExperts = 2048;  // of the whole group, expert-tensor copies included
constexpr int kMaxSlots = 32;      // K: one lane of a warp each
constexpr int kVectorBytes = 16;
constexpr int kFp8Block = 128;  // columns that share one FP8 scale

enum class DataType : int32_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

MOE_EP_HOST_DEVICE int64_t element_bytes(DataType type) { return type == DataType::kFp32 ? 4 : 2; }

// One row to fetch for this rank, as published by its source rank.
struct alignas(16) RankRow {
  int32_t token;       // of the source rank
  int32_t slot;        // place of its partial sum in the source's combine slots: its own index in
                       // what the source published, so that each rank's share is contiguous there
  int32_t item_begin;  // first of its items, relative to the items of the same source until fetched
  int32_t item_count;
};

// One expert row: a copy of a rank row at its place in the destination's result.
struct alignas(8) Item {
  int32_t row;   // of the destination rank's result
  int32_t slot;  // token*K + k of the source rank
};

MOE_EP_HOST_DEVICE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
MOE_EP_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MOE_EP_HOST_DEVICE int64_t align_up(int64_t a, int64_t multiple) {
  return ceil_div(a, multiple) * multiple;
}

}  // namespace moe_ep
