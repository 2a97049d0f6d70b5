// State that outlives a kernel: counters on the device, and what the device tells the host.
#pragma once

#include "shared/types.h"

namespace moe_ep {

// What a rank was doing when it waited. Names for messages are in runtime/communicator.cc.
enum class Phase : int32_t {
  kNone = 0,
  kCounts = 1,      // notify: counts of the peer
  kLists = 2,       // notify: rank rows and items published by the peer
  kStageFree = 3,   // dispatch: the peer still reads the staging slot to be rewritten
  kStageReady = 4,  // dispatch: rows staged by the peer
  kSlotsFree = 5,   // combine: the peer still reads its combine slots
  kPartials = 6,    // combine: partial sums of the peer
  kGrid = 7,        // blocks of this very kernel
  // Between hosts. The peer is the rank of the same local index on another host.
  kRailRouting = 8,    // notify: the expert ids of the peer's tokens
  kRailVerdict = 9,    // notify: what the peer's host thinks of the counts
  kRailRowsFree = 10,  // dispatch: the peer still reads the inbox slot to be rewritten
  kRailRows = 11,      // dispatch: rows put by the peer
  kRailSumsFree = 12,  // combine: the peer still reads the inbox slot to be rewritten
  kRailSums = 13,      // combine: sums put by the peer
};

// One per communicator, in ordinary device memory. Operation numbers live here and not in kernel
// arguments, so that a captured CUDA graph counts on when it is replayed.
struct Control {
  uint64_t operation;           // number of the last finished operation
  uint64_t num_stages;          // staging slots written so far; its parity picks the next one
  uint64_t stage_operation[2];  // that last wrote the staging slot (low latency: lent rows)
  uint64_t combine_operation;   // operation that last wrote combine slots
  uint32_t abort;               // 1 after a fault: every wait gives up at once
  uint32_t culprit;             // 1 + a rank that said its input is bad; 0: none so far
  uint32_t barrier;             // its highest bit flips when all blocks that take part have come
  uint32_t arrived_stage;       // blocks that are half done (low latency: that have read)
  uint32_t arrived_end;         // blocks that have finished it all
};

// Why an exchange of counts gave no plan; the same on all ranks.
enum class NotifyStatus : int32_t {
  kOk = 0,
  kBadInput = 1,   // `culprit` holds a bad index or said that its input is bad
  kNeedsRoom = 2,  // a rank has `max_tokens` tokens: more than symmetric memory is for
  kOverflow = 3,   // `culprit` would get `worst_rows` rows: more than the capacity
};

// What a notify found in the counts.
struct NotifyVerdict {
  NotifyStatus status;
  int32_t culprit, worst_rows, max_tokens;
};

struct FaultRecord {
  volatile uint32_t state;  // 1 once the rest is written
  int32_t rank, peer;
  Phase phase;
  uint64_t operation;
  uint64_t expected, seen;  // signal words
};

// How long a rank waited for the counts of the peer that came last, in one word: the largest word
// is the longest wait. 0: nothing is known yet.
MOE_EP_HOST_DEVICE uint64_t pack_wait(uint64_t nanoseconds, int peer) {
  return nanoseconds << 16 | static_cast<uint64_t>(peer + 1);
}
MOE_EP_HOST_DEVICE int64_t wait_nanoseconds(uint64_t word) {
  return static_cast<int64_t>(word >> 16);
}
MOE_EP_HOST_DEVICE int wait_peer(uint64_t word) { return static_cast<int>(word & 0xffff) - 1; }

// In mapped host memory: written by the device, read by the host without a synchronisation.
struct HostState {
  FaultRecord fault;
  volatile uint32_t bad_peer;       // 1 + a rank that said its input is bad in dispatch or combine
  volatile uint32_t sticky_status;  // NotifyStatus of the first failed notify nobody waited for
  volatile uint64_t slowest_peer;   // pack_wait() of the last notify
  volatile uint32_t counts_ready;   // 1 once the rest belongs to the notify in flight
  NotifyStatus status;
  int32_t culprit;
  int32_t worst_rows;
  int32_t max_tokens;
  int64_t capacity;  // that worst_rows is compared with
  int32_t num_rows, num_rank_rows, num_items;
  int32_t expert_rows[kMaxExperts];   // [L] padding included
  int32_t expert_count[kMaxExperts];  // [L]
};

}  // namespace moe_ep
