// Between hosts: where everything lies in a rank's block of the NVSHMEM heap. The only source of
// these offsets.
//
// Ranks of equal local index on different hosts form a rail; NVSHMEM moves data along rails only. A
// rank's tokens are cut into chunks of C; on a host, the tokens of one chunk of all n hosts' ranks
// of a rail are numbered host*C + t and called host tokens.
#pragma once

#include "shared/symmetric_layout.h"
#include "shared/types.h"

namespace moe_ep {

constexpr int kMaxHosts = 64;
constexpr int kInboxSlots = 2;  // chunks in flight in either direction

// What the size of the block depends on; equal on all ranks.
struct RailShape {
  int32_t num_hosts;      // n
  int32_t num_slots;      // K
  int32_t max_row_bytes;  // of a token row in its widest type
  int32_t max_scales;     // FP8 scales of a row, 0 if rows never travel as FP8
  int64_t chunk_tokens;   // C
  int64_t max_tokens;     // of any rank
};

// One word of signals per (kind, host), written by that host's rank of the rail.
enum class RailSignal : int32_t {
  kRouting = 0,    // {epoch, tokens}: its expert ids are here
  kStatus = 1,     // {epoch, status and culprit}: the verdict of its host on the counts
  kWorstRows = 2,  // {epoch, rows}: the same
  kMaxTokens = 3,  // {epoch, tokens}: the same
  kRowsReady = 4,  // signal word of the chunks put so far: dispatch
  kRowsFree = 5,   // chunks of ours it has read: dispatch
  kSumsReady = 6,  // as kRowsReady: combine
  kSumsFree = 7,   // as kRowsFree: combine
};
constexpr int kNumRailSignals = 8;

// A token's row with what travels beside it, in one piece: row, scales, probabilities.
struct RailMessage {
  int64_t scales, probs;  // offsets
  int64_t bytes;
};

MOE_EP_HOST_DEVICE RailMessage rail_message(int64_t row_bytes, int num_scales, int num_probs) {
  RailMessage message{};
  message.scales = align_up(row_bytes, kVectorBytes);
  message.probs = message.scales + align_up(num_scales * 4, kVectorBytes);
  message.bytes = message.probs + align_up(num_probs * 4, kVectorBytes);
  return message;
}

struct RailLayout {
  int64_t signals;        // uint64 [kNumRailSignals][kMaxHosts]
  int64_t routing_out;    // int32 [max_tokens][K]: expert ids of our tokens
  int64_t routing_in;     // int32 [n][max_tokens][K]: by host
  int64_t message_bytes;  // of the longest message: the distance between two
  int64_t rows_out;       // messages [kInboxSlots][C]
  int64_t rows_in;        // messages [kInboxSlots][n][C]
  int64_t sums_out;       // rows [kInboxSlots][n*C], as wide as they are
  int64_t values_out;     // float [kInboxSlots][n*C][K]
  int64_t sums_in;        // rows [kInboxSlots][n][C], max_row_bytes apart
  int64_t values_in;      // float [kInboxSlots][n][C][K]
  int64_t total;
};

MOE_EP_HOST_DEVICE int64_t rail_signal_offset(const RailLayout& layout, RailSignal signal,
                                              int host) {
  return layout.signals + (static_cast<int64_t>(signal) * kMaxHosts + host) * 8;
}

inline RailLayout rail_layout(const RailShape& shape) {
  constexpr int64_t kAlign = 256;
  int64_t end = 0;
  auto take = [&end](int64_t bytes) {
    const int64_t begin = end;
    end = align_up(end + bytes, kAlign);
    return begin;
  };
  const int64_t hosts = shape.num_hosts, chunk = shape.chunk_tokens;
  const int64_t routing = shape.max_tokens * shape.num_slots * 4;
  const int64_t values = kInboxSlots * hosts * chunk * shape.num_slots * 4;
  RailLayout layout{};
  layout.signals = take(kNumRailSignals * kMaxHosts * 8);
  layout.routing_out = take(routing);
  layout.routing_in = take(hosts * routing);
  // FP8 rows have scales and are narrower than max_row_bytes: room for both is room enough.
  layout.message_bytes = rail_message(shape.max_row_bytes, shape.max_scales, shape.num_slots).bytes;
  layout.rows_out = take(kInboxSlots * chunk * layout.message_bytes);
  layout.rows_in = take(kInboxSlots * hosts * chunk * layout.message_bytes);
  layout.sums_out = take(kInboxSlots * hosts * chunk * shape.max_row_bytes);
  layout.values_out = take(values);
  layout.sums_in = take(kInboxSlots * hosts * chunk * shape.max_row_bytes);
  layout.values_in = take(values);
  layout.total = end;
  return layout;
}

}  // namespace moe_ep
