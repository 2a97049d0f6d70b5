// Prints what csrc/shared/rail_layout.h and rail_view.h compute: one question per line of the
// standard input, one JSON object per line of the standard output. tests/unit/test_rail_layout.py
// asks and judges.
#include "shared/rail_layout.h"

#include <cstdio>
#include <iostream>
#include <string>

#include "questions.h"
#include "shared/peer_order.h"
#include "shared/rail_view.h"

namespace {

using namespace moe_ep;  // NOLINT: everything asked for is in it

RailShape read_shape(std::istream& in) {
  RailShape shape{};
  in >> shape.num_hosts >> shape.num_slots >> shape.max_row_bytes >> shape.max_scales >>
      shape.chunk_tokens >> shape.max_tokens;
  return shape;
}

void print(const char* name, int64_t value, const char* end = ", ") {
  std::printf("\"%s\": %lld%s", name, static_cast<long long>(value), end);
}

// layout n K row_bytes scales C Tmax
void layout(std::istream& in) {
  const RailLayout at = rail_layout(read_shape(in));
  std::printf("{");
  print("signals", at.signals);
  print("routing_out", at.routing_out);
  print("routing_in", at.routing_in);
  print("message_bytes", at.message_bytes);
  print("rows_out", at.rows_out);
  print("rows_in", at.rows_in);
  print("sums_out", at.sums_out);
  print("values_out", at.values_out);
  print("sums_in", at.sums_in);
  print("values_in", at.values_in);
  print("total", at.total, "}\n");
}

// message row_bytes scales probs
void message(std::istream& in) {
  long long row_bytes = 0;
  int scales = 0, probs = 0;
  in >> row_bytes >> scales >> probs;
  const RailMessage at = rail_message(row_bytes, scales, probs);
  std::printf("{");
  print("scales", at.scales);
  print("probs", at.probs);
  print("bytes", at.bytes, "}\n");
}

// inbox n K row_bytes scales C Tmax slot host t: offsets from the block's begin
void inbox(std::istream& in) {
  RailView view{};
  view.shape = read_shape(in);
  view.num_hosts = view.shape.num_hosts;
  view.layout = rail_layout(view.shape);
  int slot = 0, host = 0, t = 0;
  in >> slot >> host >> t;
  char block = 0;  // never touched: only distances from it are asked for
  view.heap = &block;
  const auto offset = [&](const void* address) {
    return reinterpret_cast<intptr_t>(address) - reinterpret_cast<intptr_t>(&block);
  };
  std::printf("{");
  print("row", offset(view.row_in(slot, host, t)));
  print("sum", offset(view.sum_in(slot, host, t)));
  print("values", offset(view.values_in(slot, host, t)));
  print("signal", offset(view.signal(RailSignal::kSumsFree, host)), "}\n");
}

// host m L expert
void host(std::istream& in) {
  RailView view{};
  int expert = 0;
  in >> view.ranks_per_host >> view.num_local_experts >> expert;
  std::printf("{\"host\": %d}\n", view.host_of_expert(expert));
}

void constants(std::istream&) {
  std::printf("{\"slots\": %d, \"signals\": %d, \"max_hosts\": %d}\n", kInboxSlots, kNumRailSignals,
              kMaxHosts);
}

}  // namespace

int main() {
  return answer_questions({
      {"layout", layout},
      {"message", message},
      {"inbox", inbox},
      {"host", host},
      {"constants", constants},
  });
}
