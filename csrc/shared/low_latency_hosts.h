// Low-latency mode between hosts: who is where, and where rows of another host are put.
//
// Layered: a token's row goes once to every other host that wants it, to the rank there of the same
// place (its rail), whose neighbours read it as they read their own staged rows. By slots: a row
// goes to each of its experts' ranks, for each expert. Either way the routes of all tokens go with
// it.
#pragma once

#include "shared/low_latency_layout.h"

namespace moe_ep {

struct LowLatencyHosts {
  int32_t num_ranks, ranks_per_host;
  int32_t by_slots;

  MOE_EP_HOST_DEVICE int32_t num_hosts() const { return num_ranks / ranks_per_host; }
  MOE_EP_HOST_DEVICE int32_t num_far() const { return num_ranks - ranks_per_host; }
  MOE_EP_HOST_DEVICE int32_t host_of(int rank) const { return rank / ranks_per_host; }
  MOE_EP_HOST_DEVICE bool same_host(int a, int b) const { return host_of(a) == host_of(b); }
  // The rank of the same place on another host.
  MOE_EP_HOST_DEVICE int32_t rail(int rank, int host) const {
    return host * ranks_per_host + rank % ranks_per_host;
  }
  // Ranks of other hosts, as a rank of `host` numbers them.
  MOE_EP_HOST_DEVICE int32_t far_index(int rank, int host) const {
    return (rank - (host + 1) * ranks_per_host + num_ranks) % num_ranks;
  }
  MOE_EP_HOST_DEVICE int32_t far_rank(int index, int host) const {
    return ((host + 1) * ranks_per_host + index) % num_ranks;
  }

  // Layered: what `source` has staged, on the rank of its place on `host`. On its own host: itself.
  MOE_EP_HOST_DEVICE int64_t stage(const LowLatencyLayout& layout, const LowLatencyBuffer& buffer,
                                   int source, int host) const {
    const int n = num_hosts();
    return buffer.rows + (host_of(source) - host + n) % n * layout.stage_bytes;
  }
  // By slots: a row of `source`, which is on another host than `owner`, for an expert of `owner`;
  // and its routes. `rows`: per expert and rank, Tmax.
  MOE_EP_HOST_DEVICE int64_t slot(const LowLatencyLayout& layout, const LowLatencyBuffer& buffer,
                                  int source, int owner, int local_expert, int64_t index,
                                  int64_t max_tokens) const {
    const int64_t segment =
        static_cast<int64_t>(local_expert) * num_far() + far_index(source, host_of(owner));
    return buffer.rows + layout.stage_bytes + (segment * max_tokens + index) * layout.row_bytes;
  }
  MOE_EP_HOST_DEVICE int64_t slot_routes(const LowLatencyLayout& layout,
                                         const LowLatencyBuffer& buffer, int source, int owner,
                                         int num_local_experts, int64_t max_tokens) const {
    const int64_t rows = static_cast<int64_t>(num_local_experts) * num_far() * max_tokens;
    return buffer.rows + layout.stage_bytes + align_up(rows * layout.row_bytes, kLowLatencyAlign) +
           far_index(source, host_of(owner)) * layout.routes_bytes;
  }
};

// Bytes of symmetric memory between hosts, where `num_bytes` are asked for.
inline int64_t low_latency_hosts_bytes(int64_t num_bytes) {
  const int64_t signal_bytes = low_latency_layout({1, 1, 1, 8, 1}, num_bytes).signal_bytes;
  return signal_bytes + 6 * low_latency_part(signal_bytes, num_bytes);
}

// Of one rank, in ordinary device memory: a replayed CUDA graph counts on.
struct LowLatencyBorder {
  // Put so far, by buffer and rank: to the rank's host, and to the rank alone.
  uint64_t host_messages[2][kMaxRanks];
  uint64_t rank_messages[2][kMaxRanks];
  uint64_t rows, bytes;  // of rows put
  uint64_t other_bytes;  // of routes put
};

}  // namespace moe_ep
