// A communicator as the kernels see it: passed by value as part of every kernel's Args.
#pragma once

#include "shared/control.h"
#include "shared/symmetric_layout.h"

namespace moe_ep {

struct CommView {
  int32_t rank;
  int32_t num_ranks;
  int32_t bad_input;   // 1: this rank's data means nothing; peers are told
  int32_t first_rank;  // of this host in the group; 0 where all ranks are on one
  uint64_t timeout_ns;
  Control* control;
  HostState* host;
  SymmetricLayout layout;
  int32_t num_experts;
  int32_t max_slots;
  int64_t max_tokens;
  char* peers[kMaxRanks];  // symmetric memory of every rank, as mapped here

  MOE_EP_HOST_DEVICE uint64_t* signal(int owner, Signal kind, int writer) const {
    return reinterpret_cast<uint64_t*>(peers[owner] + signal_offset(layout, kind, writer));
  }
};

}  // namespace moe_ep
