// A rank's end of its rail as the kernels see it: passed by value as part of every kernel's Args.
#pragma once

#include "shared/control.h"
#include "shared/rail_layout.h"

namespace moe_ep {

// One per communicator, in ordinary device memory: a captured CUDA graph counts on when it is
// replayed. All ranks count the same chunks, whether they have tokens in them or not.
struct RailControl {
  uint64_t epoch;            // exchanges of expert ids so far
  uint64_t chunks_sent;      // dispatch: put into the inboxes of other hosts
  uint64_t chunks_staged;    // dispatch: read from our inbox
  uint64_t chunks_returned;  // combine: put into the inboxes of other hosts
  uint64_t chunks_summed;    // combine: read from our inbox
  uint32_t arrived_routing;  // blocks that have put their part
  uint32_t arrived_routing_end, arrived_send, arrived_stage, arrived_return, arrived_sum;
  NotifyVerdict verdict;  // of this host's counts
  // What was put to other hosts since the communicator was made.
  uint64_t border_rows;         // rows of tokens or sums
  uint64_t border_bytes;        // of these rows and what travels with them in one message
  uint64_t border_other_bytes;  // expert ids and carried values
};

struct RailView {
  int32_t host, num_hosts;
  int32_t local_rank, ranks_per_host;
  int32_t num_local_experts;  // L
  RailShape shape;
  RailLayout layout;
  RailControl* control;
  char* heap;  // this rank's block, and the symmetric address of everybody's

  MOE_EP_HOST_DEVICE int rank_on(int of_host) const {
    return of_host * ranks_per_host + local_rank;
  }
  // The host of an expert slot of the whole group; -1 for an unused slot.
  MOE_EP_HOST_DEVICE int host_of_expert(int expert) const {
    return expert < 0 ? -1 : expert / (ranks_per_host * num_local_experts);
  }
  MOE_EP_HOST_DEVICE uint64_t* signal(RailSignal kind, int writer) const {
    return reinterpret_cast<uint64_t*>(heap + rail_signal_offset(layout, kind, writer));
  }
  // Message of token t of `from` in an inbox slot.
  MOE_EP_HOST_DEVICE char* row_in(int64_t slot, int from, int64_t t) const {
    const int64_t index = (slot * num_hosts + from) * shape.chunk_tokens + t;
    return heap + layout.rows_in + index * layout.message_bytes;
  }
  MOE_EP_HOST_DEVICE char* sum_in(int64_t slot, int from, int64_t t) const {
    const int64_t index = (slot * num_hosts + from) * shape.chunk_tokens + t;
    return heap + layout.sums_in + index * shape.max_row_bytes;
  }
  MOE_EP_HOST_DEVICE float* values_in(int64_t slot, int from, int64_t t) const {
    const int64_t index = (slot * num_hosts + from) * shape.chunk_tokens + t;
    return reinterpret_cast<float*>(heap + layout.values_in) + index * shape.num_slots;
  }
};

}  // namespace moe_ep
