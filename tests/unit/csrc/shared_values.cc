// Prints what csrc/shared computes: one question per line of the standard input, one JSON object
// per line of the standard output. tests/unit/test_csrc_shared.py asks and judges.
#include <cstdio>
#include <iostream>
#include <string>

#include "questions.h"
#include "shared/comm_view.h"
#include "shared/control.h"
#include "shared/peer_order.h"
#include "shared/plan_layout.h"
#include "shared/row_shape.h"
#include "shared/symmetric_layout.h"
#include "shared/types.h"

namespace {

using namespace moe_ep;  // NOLINT: everything asked for is in it

class Object {
 public:
  Object() { std::putchar('{'); }
  ~Object() { std::puts("}"); }
  void add(const char* name, long long value) {
    std::printf("%s\"%s\": %lld", first_ ? "" : ", ", name, value);
    first_ = false;
  }

 private:
  bool first_ = true;
};

void constants(std::istream&) {
  Object out;
  out.add("max_ranks", kMaxRanks);
  out.add("max_experts", kMaxExperts);
  out.add("max_slots", kMaxSlots);
  out.add("vector_bytes", kVectorBytes);
  out.add("fp8_block", kFp8Block);
  out.add("num_signals", kNumSignals);
  out.add("warp", kWarp);
  out.add("vectors_per_lane", kVectorsPerLane);
  out.add("rank_row_bytes", sizeof(RankRow));
  out.add("item_bytes", sizeof(Item));
  out.add("bf16", static_cast<int>(DataType::kBf16));
  out.add("fp16", static_cast<int>(DataType::kFp16));
  out.add("fp32", static_cast<int>(DataType::kFp32));
  out.add("bf16_bytes", element_bytes(DataType::kBf16));
  out.add("fp16_bytes", element_bytes(DataType::kFp16));
  out.add("fp32_bytes", element_bytes(DataType::kFp32));
  out.add("ok", static_cast<int>(NotifyStatus::kOk));
  out.add("bad_input", static_cast<int>(NotifyStatus::kBadInput));
  out.add("needs_room", static_cast<int>(NotifyStatus::kNeedsRoom));
  out.add("overflow", static_cast<int>(NotifyStatus::kOverflow));
}

// layout R E K row_bytes scales exact T
void symmetric(std::istream& in) {
  SymmetricShape shape{};
  in >> shape.num_ranks >> shape.num_experts >> shape.num_slots >> shape.max_row_bytes >>
      shape.max_scales >> shape.exact_combine >> shape.max_tokens;
  const SymmetricLayout layout = symmetric_layout(shape);
  Object out;
  out.add("signals", layout.signals);
  out.add("counts", layout.counts);
  out.add("rank_rows", layout.rank_rows);
  out.add("items", layout.items);
  out.add("stage_0", layout.stage[0]);
  out.add("stage_1", layout.stage[1]);
  out.add("stage_scales", layout.stage_scales);
  out.add("stage_probs", layout.stage_probs);
  out.add("slots", layout.slots);
  out.add("slot_weights", layout.slot_weights);
  out.add("slot_values", layout.slot_values);
  out.add("total", layout.total);
  out.add("columns", count_columns(shape.num_experts, shape.num_ranks));
  out.add("bad_index_column", bad_index_column(shape.num_experts, shape.num_ranks));
  out.add("num_tokens_column", num_tokens_column(shape.num_experts, shape.num_ranks));
}

// signal kind peer: its offset in a layout whose signals begin at 1000
void signal(std::istream& in) {
  int kind = 0, peer = 0;
  in >> kind >> peer;
  SymmetricLayout layout{};
  layout.signals = 1000;
  Object out;
  out.add("offset", signal_offset(layout, static_cast<Signal>(kind), peer));
}

// header R L
void header(std::istream& in) {
  int num_ranks = 0, num_local_experts = 0;
  in >> num_ranks >> num_local_experts;
  const PlanHeader at = plan_header(num_ranks, num_local_experts);
  Object out;
  out.add("num_rows", at.num_rows);
  out.add("num_rank_rows", at.num_rank_rows);
  out.add("num_items", at.num_items);
  out.add("status", at.status);
  out.add("rank_row_begin", at.rank_row_begin);
  out.add("item_begin", at.item_begin);
  out.add("source_rank_row", at.source_rank_row);
  out.add("source_item", at.source_item);
  out.add("expert_begin", at.expert_begin);
  out.add("expert_count", at.expert_count);
  out.add("total", at.total);
}

// row bytes: each piece as "vectors_i" and "offset_i"
void row(std::istream& in) {
  long long bytes = 0;
  in >> bytes;
  const RowShape shape = row_shape(bytes);
  Object out;
  out.add("row_bytes", shape.row_bytes);
  out.add("vectors", shape.vectors);
  out.add("pieces", shape.pieces);
  out.add("piece_vectors", shape.piece_vectors);
  for (int i = 0; i < shape.pieces; ++i) {
    out.add(("vectors_" + std::to_string(i)).c_str(), shape.vectors_of(i));
    out.add(("offset_" + std::to_string(i)).c_str(), shape.offset_of(i));
  }
}

// destinations K R
void destinations(std::istream& in) {
  int num_slots = 0, num_ranks = 0;
  in >> num_slots >> num_ranks;
  Object out;
  out.add("max", max_destinations(num_slots, num_ranks));
}

// peer ME STEP N
void peer(std::istream& in) {
  int me = 0, step = 0, n = 0;
  in >> me >> step >> n;
  Object out;
  out.add("peer", staggered_peer(me, step, n));
}

}  // namespace

int main() {
  return answer_questions({
      {"constants", constants},
      {"layout", symmetric},
      {"signal", signal},
      {"header", header},
      {"row", row},
      {"destinations", destinations},
      {"peer", peer},
  });
}
