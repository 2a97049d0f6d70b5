// Where everything lies in the symmetric memory of low-latency mode. The only source of these
// offsets and of the size hint.
//
// Operations (a dispatch or a combine each) use two buffers in turn, so that one can be sent while
// another is still being received. Signals have places that no shape moves; the data of the two
// buffers begin half the memory apart, so that operations of different shapes never meet either.
#pragma once

#include "shared/symmetric_layout.h"

namespace moe_ep {

// Equal on all ranks of an operation.
struct LowLatencyShape {
  int32_t num_ranks;
  int32_t num_experts;  // E
  int32_t num_slots;    // K
  int32_t hidden;       // H
  int32_t max_tokens;   // Tmax, of any rank
};

// Offsets of one of the two buffers. L = E/R local experts.
struct LowLatencyBuffer {
  // Signals: words as below, each written by one peer.
  int64_t dispatch_ready;  // uint64 [L][R]: the peer has sent its rows for a local expert
  int64_t combine_ready;   // uint64 [R]: the peer has sent its expert rows
  int64_t received;        // uint64 [R]: the operation whose rows the peer has read
  // Data. A row holds H bf16 values, or H FP8 values followed by their H/128 scales.
  int64_t rows;   // dispatch: [L][R][Tmax][row_bytes]; combine: [Tmax][K][row_bytes]
  int64_t slots;  // int32 [L][R][Tmax]: token*K + k of the peer
};

struct LowLatencyLayout {
  LowLatencyBuffer buffers[2];
  int64_t row_bytes;
  int64_t signal_bytes;  // at the front of the memory: must start at zero
  int64_t total;         // bytes this shape needs: the size hint
};

constexpr int64_t kLowLatencyAlign = 256;
// Marks of the set-up checks (Signal::kHello and so on), as in every symmetric memory.
constexpr int64_t kLowLatencyMarkBytes = 4096;
static_assert(kNumSignals * kMaxRanks * 8 <= kLowLatencyMarkBytes, "the marks need more room");

// Slots of a token at most: with an expert named once per token, as many as there are experts.
MOE_EP_HOST_DEVICE int32_t max_low_latency_slots(int32_t num_experts) {
  return num_experts < kMaxSlots ? num_experts : kMaxSlots;
}

// num_bytes: of the memory; where the second buffer's data begin depends on it and not on the
// shape. `total` is right whatever it is.
inline LowLatencyLayout low_latency_layout(const LowLatencyShape& shape, int64_t num_bytes) {
  LowLatencyLayout layout{};
  int64_t end = kLowLatencyMarkBytes;
  auto take = [&end](int64_t bytes) {
    const int64_t begin = end;
    end = align_up(end + bytes, kLowLatencyAlign);
    return begin;
  };
  for (LowLatencyBuffer& buffer : layout.buffers) {
    buffer.dispatch_ready = take(kMaxExperts * 8);
    buffer.combine_ready = take(kMaxRanks * 8);
    buffer.received = take(kMaxRanks * 8);
  }
  layout.signal_bytes = end;
  layout.row_bytes = static_cast<int64_t>(shape.hidden) * 2;
  // A token has fewer slots than there are experts, so the rows of a combine fit where those of a
  // dispatch do.
  const int64_t num_rows = static_cast<int64_t>(shape.num_experts) * shape.max_tokens;
  const int64_t slots = align_up(num_rows * layout.row_bytes, kLowLatencyAlign);
  const int64_t data_bytes = slots + align_up(num_rows * 4, kLowLatencyAlign);
  const int64_t half = (num_bytes - end) / 2 / kLowLatencyAlign * kLowLatencyAlign;
  for (int i = 0; i < 2; ++i) {
    layout.buffers[i].rows = layout.signal_bytes + i * half;
    layout.buffers[i].slots = layout.buffers[i].rows + slots;
  }
  layout.total = layout.signal_bytes + 2 * data_bytes;
  return layout;
}

// A ready word: value and signal in one. The operation's number makes clearing unnecessary, also
// when a CUDA graph is replayed; the tag says what kind of operation of which shape it is.
constexpr int kWordTagBits = 8, kWordCountBits = 23;
constexpr int32_t kMaxLowLatencyTokens = (1 << kWordCountBits) - 1;

MOE_EP_HOST_DEVICE uint64_t ready_word(uint64_t operation, uint32_t tag, bool bad_input,
                                       uint32_t count) {
  const uint32_t low =
      tag << (kWordCountBits + 1) | static_cast<uint32_t>(bad_input) << kWordCountBits | count;
  return operation << 32 | low;
}
MOE_EP_HOST_DEVICE uint32_t word_operation(uint64_t word) {
  return static_cast<uint32_t>(word >> 32);
}
MOE_EP_HOST_DEVICE uint32_t word_tag(uint64_t word) {
  return static_cast<uint32_t>(word) >> (kWordCountBits + 1);
}
MOE_EP_HOST_DEVICE bool word_is_bad(uint64_t word) { return (word >> kWordCountBits & 1) != 0; }
MOE_EP_HOST_DEVICE int32_t word_count(uint64_t word) {
  return static_cast<int32_t>(word & kMaxLowLatencyTokens);
}

}  // namespace moe_ep
