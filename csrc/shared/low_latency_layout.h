// Where everything lies in the symmetric memory of low-latency mode. The only source of these
// offsets and of the size hint.
//
// Operations (a dispatch or a combine each) use two buffers in turn, so that one can be sent while
// another is still being received. Signals have places that no shape moves; what follows them is
// cut into four equal parts wherever the shape's own data end, so that operations of different
// shapes never meet either: the data of the two buffers, and expert rows that peers read where they
// are (zero copy), also twice. Between hosts two more parts of the same size follow: rows on their
// way out.
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

// Where a token's row goes: for each of its K slots.
struct alignas(8) Route {
  int32_t expert;  // -1: nowhere
  int32_t index;   // among this rank's rows for the expert
};

// Offsets of one of the two buffers. L = E/R local experts.
struct LowLatencyBuffer {
  // Signals: words as below, each written by one peer.
  int64_t counts;    // dispatch, uint64 [R][L]: rows of the peer for a local expert
  int64_t places;    // combine, uint64 [E]: where an expert's rows are or will be
  int64_t senders;   // uint64 [R]: in place of the tag the blocks of the peer's launch that write
                     // rows; its count: its tokens
  int64_t blocks;    // uint64 [R][kMaxLowLatencyBlocks]: the operation whose rows a block of the
                     // peer has written
  int64_t received;  // uint64 [R][kMaxLowLatencyBlocks]: received_word() of the operation whose
                     // rows a block of the peer, or of another host the whole peer, has read
  // Signals between hosts. Messages are counted from the start on, modulo 1 << kWordCountBits.
  int64_t counts_out;    // uint64 [E]: the `counts` of the experts' ranks, as this rank puts them
  int64_t messages;      // uint64 [R]: a ready word; its count: messages that the peer has put
  int64_t arrived;       // uint64 [R]: those for this rank that have come
  int64_t arrived_host;  // uint64 [R]: those for this host that have come to this rank
  // Data. A row holds H bf16 values, or H FP8 values followed by their H/128 scales.
  int64_t rows;    // dispatch, of this rank: [Tmax][row_bytes]; combine: [Tmax][K][row_bytes]
  int64_t routes;  // dispatch, of this rank: Route [Tmax][K]
  int64_t order;   // dispatch, of this rank: int32 [E][Tmax], token*K + k of its rows for an expert
                   // What other hosts put follows: see low_latency_hosts.h.
  // Not of an operation but of a combine's caller, who asks for one or the other.
  int64_t expert_out;  // [L][R*Tmax][row_bytes]
  int64_t returning;   // several hosts: expert rows to be put, [at most L*R*Tmax][row_bytes]
};

struct LowLatencyLayout {
  LowLatencyBuffer buffers[2];
  int64_t pings;  // uint64 [R]: of the peer, to measure how long a signal takes
  int64_t row_bytes;
  int64_t routes_bytes;  // of one rank's routes
  int64_t stage_bytes;   // of one rank's staged rows, their routes and their order
  int64_t signal_bytes;  // at the front of the memory: must start at zero
  int64_t total;         // bytes this shape needs, on however many hosts: the size hint
};

constexpr int64_t kLowLatencyAlign = 256;
constexpr int kMaxLowLatencyBlocks = 255;  // of a launch: so many go in place of a tag
// Marks of the set-up checks (Signal::kHello and so on), as in every symmetric memory.
constexpr int64_t kLowLatencyMarkBytes = 4096;
static_assert(kNumSignals * kMaxRanks * 8 <= kLowLatencyMarkBytes, "the marks need more room");

// Slots of a token at most: with an expert named once per token, as many as there are experts.
MOE_EP_HOST_DEVICE int32_t max_low_latency_slots(int32_t num_experts) {
  return num_experts < kMaxSlots ? num_experts : kMaxSlots;
}

// Of a part; num_bytes: of the memory, for the four that every host count has.
inline int64_t low_latency_part(int64_t signal_bytes, int64_t num_bytes) {
  return (num_bytes - signal_bytes) / 4 / kLowLatencyAlign * kLowLatencyAlign;
}

// num_bytes: of the memory; where the parts begin depends on it and not on the shape. `total` is
// right whatever it is.
inline LowLatencyLayout low_latency_layout(const LowLatencyShape& shape, int64_t num_bytes) {
  LowLatencyLayout layout{};
  int64_t end = kLowLatencyMarkBytes;
  auto take = [&end](int64_t bytes) {
    const int64_t begin = end;
    end = align_up(end + bytes, kLowLatencyAlign);
    return begin;
  };
  for (LowLatencyBuffer& buffer : layout.buffers) {
    buffer.counts = take(kMaxExperts * 8);
    buffer.places = take(kMaxExperts * 8);
    buffer.senders = take(kMaxRanks * 8);
    buffer.blocks = take(kMaxRanks * kMaxLowLatencyBlocks * 8);
    buffer.received = take(kMaxRanks * kMaxLowLatencyBlocks * 8);
    buffer.counts_out = take(kMaxExperts * 8);
    buffer.messages = take(kMaxRanks * 8);
    buffer.arrived = take(kMaxRanks * 8);
    buffer.arrived_host = take(kMaxRanks * 8);
  }
  layout.pings = take(kMaxRanks * 8);
  layout.signal_bytes = end;
  layout.row_bytes = static_cast<int64_t>(shape.hidden) * 2;
  const int64_t tokens = shape.max_tokens, slots = max_low_latency_slots(shape.num_experts);
  const int64_t ranks = shape.num_ranks, local = shape.num_experts / ranks;
  const int64_t staged = align_up(tokens * layout.row_bytes, kLowLatencyAlign);
  layout.routes_bytes =
      align_up(tokens * slots * static_cast<int64_t>(sizeof(Route)), kLowLatencyAlign);
  const int64_t order = align_up(tokens * shape.num_experts * static_cast<int64_t>(sizeof(int32_t)),
                                 kLowLatencyAlign);
  layout.stage_bytes = staged + layout.routes_bytes + order;
  // Expert rows, of which a token has no more slots than there are experts; a stage for each host;
  // or one, with routes and a slot for each row that comes from another host.
  int64_t most = tokens * shape.num_experts * layout.row_bytes;
  const int64_t inboxes = ranks * layout.stage_bytes;
  const int64_t slot_rows = tokens * (shape.num_experts - local) * layout.row_bytes;
  const int64_t in_slots = layout.stage_bytes + ranks * layout.routes_bytes + slot_rows;
  if (most < inboxes) most = inboxes;
  if (most < in_slots) most = in_slots;
  const int64_t part = low_latency_part(end, num_bytes);
  for (int i = 0; i < 2; ++i) {
    layout.buffers[i].rows = layout.signal_bytes + i * part;
    layout.buffers[i].routes = layout.buffers[i].rows + staged;
    layout.buffers[i].order = layout.buffers[i].routes + layout.routes_bytes;
    layout.buffers[i].expert_out = layout.signal_bytes + (2 + i) * part;
    layout.buffers[i].returning = layout.signal_bytes + (4 + i) * part;
  }
  layout.total = layout.signal_bytes + 4 * align_up(most, kLowLatencyAlign);
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

// What a block tells those whose rows it has read: the operation, and the blocks of its launch.
constexpr int kWordBlocksBits = 8;
static_assert(kMaxLowLatencyBlocks < 1 << kWordBlocksBits, "the blocks need more bits");

MOE_EP_HOST_DEVICE uint64_t received_word(uint64_t operation, int num_blocks) {
  return operation << kWordBlocksBits | static_cast<uint64_t>(num_blocks);
}
MOE_EP_HOST_DEVICE uint64_t received_operation(uint64_t word) { return word >> kWordBlocksBits; }
MOE_EP_HOST_DEVICE int received_blocks(uint64_t word) {
  return static_cast<int>(word & ((1 << kWordBlocksBits) - 1));
}

// The count of a combine's word: where the expert's rows for the reader are. source 0: in the
// reader's own slots. 1 or 2: in that one of the writer's `expert_out`, from row `begin` on. 3: in
// the tensor that the reader itself gave, likewise.
constexpr int kPlaceBeginBits = 21;
constexpr int32_t kMaxPlaceBegin = (1 << kPlaceBeginBits) - 1;
constexpr uint32_t kPlaceOwn = 3;

MOE_EP_HOST_DEVICE uint32_t row_place(uint32_t source, uint32_t begin) {
  return source << kPlaceBeginBits | begin;
}
MOE_EP_HOST_DEVICE int32_t place_source(int32_t place) { return place >> kPlaceBeginBits; }
MOE_EP_HOST_DEVICE int32_t place_begin(int32_t place) { return place & kMaxPlaceBegin; }

}  // namespace moe_ep
