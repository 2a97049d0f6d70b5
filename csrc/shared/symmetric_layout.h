// Where everything lies in a rank's symmetric memory. The only source of these offsets.
#pragma once

#include "shared/types.h"

namespace moe_ep {

// What the size of symmetric memory depends on; equal on all ranks of the group.
struct SymmetricShape {
  int32_t num_ranks;
  int32_t num_experts;    // E
  int32_t num_slots;      // K at most
  int32_t max_row_bytes;  // of a token row in its widest type
  int32_t max_scales;     // FP8 scales of a row, 0 if rows never travel as FP8
  int32_t exact_combine;  // 1: combine slots hold every expert row, 0: one partial sum per rank
  int64_t max_tokens;     // of any rank
  int64_t list_tokens;    // tokens that lists are for, where rows move in parts; 0: max_tokens
};

// Signal words count operations, or chunks, and say below that whose input is bad: 1 + its rank in
// the group, 0 for nobody's.
constexpr int kCulpritBits = 16;
constexpr uint64_t kCulpritMask = (uint64_t{1} << kCulpritBits) - 1;

// One signal word per (kind, peer), written by that peer, of the operation.
enum class Signal : int32_t {
  kListsReady = 0,    // the peer has published its rank rows and items
  kStageReady = 1,    // the peer has staged its rows
  kStageDone = 2,     // the peer has read our staged rows
  kCombineReady = 3,  // the peer has written its partial sums into our slots
  kCombineDone = 4,   // the peer has read its combine slots: we may write them again
  kHello = 5,         // set-up check: the peer's rank + 1
  kGoodbye = 6,       // the peer will not touch our memory again: its rank + 1
};
constexpr int kNumSignals = 7;

struct SymmetricLayout {
  int64_t signals;       // uint64 [kNumSignals][kMaxRanks]
  int64_t counts;        // uint64 [R][count_columns]: {operation, value}, row r written by rank r
  int64_t rank_rows;     // RankRow [T*D], grouped by destination rank
  int64_t items;         // Item [T*K], grouped by destination rank
  int64_t stage[2];      // rows [T][max_row_bytes], then scales, then probabilities
  int64_t stage_scales;  // relative to stage: float [T][max_scales]
  int64_t stage_probs;   // relative to stage: float [T][K]
  int64_t slots;         // rows [T*slots_per_token][max_row_bytes]
  int64_t slot_weights;  // float [T*K]: combine weights of exact mode
  int64_t slot_values;   // float [T*K]: values carried by combine
  int64_t total;
};

// Destinations a token can have at most (D).
MOE_EP_HOST_DEVICE int32_t max_destinations(int32_t num_slots, int32_t num_ranks) {
  return num_slots < num_ranks ? num_slots : num_ranks;
}

// Columns of the count matrix, a row of which a rank counts for itself: E expert counts, for each
// destination rank its rank rows and its items, bad indices, tokens.
MOE_EP_HOST_DEVICE int32_t rank_rows_column(int32_t num_experts) { return num_experts; }
MOE_EP_HOST_DEVICE int32_t items_column(int32_t num_experts, int32_t num_ranks) {
  return num_experts + num_ranks;
}
MOE_EP_HOST_DEVICE int32_t bad_index_column(int32_t num_experts, int32_t num_ranks) {
  return num_experts + 2 * num_ranks;
}
MOE_EP_HOST_DEVICE int32_t num_tokens_column(int32_t num_experts, int32_t num_ranks) {
  return num_experts + 2 * num_ranks + 1;
}
MOE_EP_HOST_DEVICE int32_t count_columns(int32_t num_experts, int32_t num_ranks) {
  return num_experts + 2 * num_ranks + 2;
}

MOE_EP_HOST_DEVICE int64_t signal_offset(const SymmetricLayout& layout, Signal signal, int peer) {
  return layout.signals + (static_cast<int64_t>(signal) * kMaxRanks + peer) * 8;
}

inline SymmetricLayout symmetric_layout(const SymmetricShape& shape) {
  constexpr int64_t kAlign = 256;
  int64_t end = 0;
  auto take = [&end](int64_t bytes) {
    const int64_t begin = end;
    end = align_up(end + bytes, kAlign);
    return begin;
  };
  const int64_t tokens = shape.max_tokens;
  const int64_t destinations = max_destinations(shape.num_slots, shape.num_ranks);
  const int64_t slots_per_token = shape.exact_combine ? shape.num_slots : destinations;
  const int64_t listed = shape.list_tokens > 0 ? shape.list_tokens : tokens;
  // One rank alone stages only what it quantises and needs no combine slots. Where it is alone on
  // its host only, rows of other hosts are staged.
  const bool alone = shape.num_ranks == 1 && shape.list_tokens == 0;
  SymmetricLayout layout{};
  layout.signals = take(kNumSignals * kMaxRanks * 8);
  layout.counts = take(static_cast<int64_t>(shape.num_ranks) *
                       count_columns(shape.num_experts, shape.num_ranks) * 8);
  layout.rank_rows = take(listed * destinations * static_cast<int64_t>(sizeof(RankRow)));
  layout.items = take(listed * shape.num_slots * static_cast<int64_t>(sizeof(Item)));
  const int64_t staged_row = alone ? shape.max_scales * kFp8Block : shape.max_row_bytes;
  layout.stage_scales = align_up(tokens * staged_row, kAlign);
  layout.stage_probs = layout.stage_scales + align_up(tokens * shape.max_scales * 4, kAlign);
  const int64_t stage_bytes = layout.stage_probs + tokens * shape.num_slots * 4;
  layout.stage[0] = take(stage_bytes);
  layout.stage[1] = take(stage_bytes);
  layout.slots = take(alone ? 0 : tokens * slots_per_token * shape.max_row_bytes);
  layout.slot_weights = take(alone ? 0 : tokens * shape.num_slots * 4);
  layout.slot_values = take(alone ? 0 : tokens * shape.num_slots * 4);
  layout.total = end;
  return layout;
}

}  // namespace moe_ep
