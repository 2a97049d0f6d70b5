// Prints what csrc/shared/low_latency_layout.h and low_latency_hosts.h compute: one question per
// line of the standard input, one JSON object per line of the standard output.
// tests/unit/test_low_latency_layout.py asks and judges.
#include <cstdio>
#include <iostream>
#include <string>
#include <utility>

#include "questions.h"
#include "shared/divisor.h"
#include "shared/low_latency_hosts.h"

namespace {

using namespace moe_ep;  // NOLINT: everything asked for is in it

// layout R E K H Tmax bytes
void layout(std::istream& in) {
  LowLatencyShape shape{};
  long long num_bytes = 0;
  in >> shape.num_ranks >> shape.num_experts >> shape.num_slots >> shape.hidden >>
      shape.max_tokens >> num_bytes;
  const LowLatencyLayout at = low_latency_layout(shape, num_bytes);
  std::printf("{\"row_bytes\": %lld, \"pings\": %lld, \"signal_bytes\": %lld, \"total\": %lld",
              static_cast<long long>(at.row_bytes), static_cast<long long>(at.pings),
              static_cast<long long>(at.signal_bytes), static_cast<long long>(at.total));
  for (int i = 0; i < 2; ++i) {
    const LowLatencyBuffer& buffer = at.buffers[i];
    const std::pair<const char*, int64_t> offsets[] = {{"counts", buffer.counts},
                                                       {"places", buffer.places},
                                                       {"senders", buffer.senders},
                                                       {"blocks", buffer.blocks},
                                                       {"received", buffer.received},
                                                       {"rows", buffer.rows},
                                                       {"routes", buffer.routes},
                                                       {"order", buffer.order},
                                                       {"expert_out", buffer.expert_out},
                                                       {"counts_out", buffer.counts_out},
                                                       {"messages", buffer.messages},
                                                       {"arrived", buffer.arrived},
                                                       {"arrived_host", buffer.arrived_host},
                                                       {"returning", buffer.returning}};
    for (const auto& [name, offset] : offsets) {
      std::printf(", \"%s_%d\": %lld", name, i, static_cast<long long>(offset));
    }
  }
  std::printf(", \"routes_bytes\": %lld, \"stage_bytes\": %lld, \"hosts_bytes\": %lld}\n",
              static_cast<long long>(at.routes_bytes), static_cast<long long>(at.stage_bytes),
              static_cast<long long>(low_latency_hosts_bytes(num_bytes)));
}

// hosts R per_host E H Tmax me: where the first buffer of `me` has what each other rank puts there,
// and how `me` numbers the ranks of other hosts
void hosts(std::istream& in) {
  LowLatencyShape shape{};
  LowLatencyHosts at{};
  int me = 0;
  in >> at.num_ranks >> at.ranks_per_host >> shape.num_experts >> shape.hidden >>
      shape.max_tokens >> me;
  shape.num_ranks = at.num_ranks;
  const LowLatencyLayout layout = low_latency_layout(shape, int64_t{1} << 50);
  const LowLatencyBuffer& buffer = layout.buffers[0];
  const int local = shape.num_experts / shape.num_ranks;
  const char* separator = "";
  std::printf("{\"regions\": [");
  auto region = [&separator](const char* name, int source, int64_t begin, int64_t bytes) {
    std::printf("%s[\"%s\", %d, %lld, %lld]", separator, name, source,
                static_cast<long long>(begin), static_cast<long long>(bytes));
    separator = ", ";
  };
  region("own", me, at.stage(layout, buffer, me, at.host_of(me)) - buffer.rows, layout.stage_bytes);
  for (int source = 0; source < at.num_ranks; ++source) {
    if (at.same_host(source, me)) continue;
    if (at.rail(source, at.host_of(me)) == me) {
      region("inbox", source, at.stage(layout, buffer, source, at.host_of(me)) - buffer.rows,
             layout.stage_bytes);
    }
    for (int e = 0; e < local; ++e) {
      region("slots", source,
             at.slot(layout, buffer, source, me, e, 0, shape.max_tokens) - buffer.rows,
             shape.max_tokens * layout.row_bytes);
    }
    region("routes", source,
           at.slot_routes(layout, buffer, source, me, local, shape.max_tokens) - buffer.rows,
           layout.routes_bytes);
  }
  std::printf("], \"far\": [");
  for (int i = 0; i < at.num_far(); ++i) {
    const int rank = at.far_rank(i, at.host_of(me));
    std::printf("%s[%d, %d]", i == 0 ? "" : ", ", rank, at.far_index(rank, at.host_of(me)));
  }
  std::printf("], \"part\": %lld}\n",
              static_cast<long long>((layout.total - layout.signal_bytes) / 4));
}

// word operation tag bad count: the word's parts, as the receiver reads them
void word(std::istream& in) {
  unsigned long long operation = 0;
  unsigned tag = 0, bad = 0, count = 0;
  in >> operation >> tag >> bad >> count;
  const uint64_t value = ready_word(operation, tag, bad != 0, count);
  std::printf("{\"operation\": %u, \"tag\": %u, \"bad\": %d, \"count\": %d}\n",
              word_operation(value), word_tag(value), word_is_bad(value), word_count(value));
}

// place source begin: its parts, as the receiver reads them
void place(std::istream& in) {
  unsigned source = 0, begin = 0;
  in >> source >> begin;
  const uint32_t value = row_place(source, begin);
  const bool fits = value <= static_cast<uint32_t>(kMaxLowLatencyTokens);
  std::printf("{\"source\": %d, \"begin\": %d, \"fits\": %d}\n",
              place_source(static_cast<int32_t>(value)), place_begin(static_cast<int32_t>(value)),
              fits);
}

// received operation blocks: the word's parts, as the peer reads them
void received(std::istream& in) {
  unsigned long long operation = 0;
  int blocks = 0;
  in >> operation >> blocks;
  const uint64_t value = received_word(operation, blocks);
  std::printf("{\"operation\": %llu, \"blocks\": %d}\n",
              static_cast<unsigned long long>(received_operation(value)), received_blocks(value));
}

// divide d n: n / d and n % d, as kernels compute them
void divide(std::istream& in) {
  uint32_t divisor = 1, n = 0;
  in >> divisor >> n;
  const Divisor by = divide_by(divisor);
  const uint32_t quotient = by.quotient(n);
  std::printf("{\"quotient\": %u, \"remainder\": %u}\n", quotient, by.remainder(n, quotient));
}

void constants(std::istream&) {
  std::printf(
      "{\"max_tokens\": %d, \"max_slots\": %d, \"max_experts\": %d, \"max_ranks\": %d, "
      "\"max_blocks\": %d, \"mark_bytes\": %lld, \"marks\": %d, \"tags\": %d}\n",
      kMaxLowLatencyTokens, kMaxSlots, kMaxExperts, kMaxRanks, kMaxLowLatencyBlocks,
      static_cast<long long>(kLowLatencyMarkBytes), kNumSignals * kMaxRanks * 8, 1 << kWordTagBits);
}

// slots E
void slots(std::istream& in) {
  int num_experts = 0;
  in >> num_experts;
  std::printf("{\"max\": %d}\n", max_low_latency_slots(num_experts));
}

}  // namespace

int main() {
  return answer_questions({
      {"layout", layout},
      {"hosts", hosts},
      {"word", word},
      {"place", place},
      {"received", received},
      {"divide", divide},
      {"constants", constants},
      {"slots", slots},
  });
}
