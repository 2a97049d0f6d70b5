// A rank's end of the expert-parallel exchange on one host: owns its memory, launches its kernels.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/symmetric_memory.h"
#include "shared/comm_view.h"
#include "shared/plan_layout.h"
#include "shared/staged_source.h"

namespace moe_ep {

struct CommunicatorConfig {
  int device = 0;
  int rank = 0;
  int num_ranks = 1;
  int num_experts = 1;     // of the whole group, expert-tensor copies included
  int num_slots = 1;       // K at most
  int max_row_bytes = 16;  // of a token row in its widest type
  int max_scales = 0;      // FP8 scales of a row, 0 if rows never travel as FP8
  bool exact_combine = false;
  int row_alignment = 1;
  // Between hosts: all above is of one host, num_experts counts every expert once for each host its
  // rows come from, and rows move in chunks of so many tokens of each rank. 0: one host.
  int num_hosts = 0;
  int host = 0;
  int chunk_tokens = 0;
};

// How to launch one operation.
struct Launch {
  uintptr_t stream = 0;
  double timeout_s = 60.0;
  int num_sms = 24;
  bool bad_input = false;  // this rank's data means nothing: peers are told
};

// Device addresses; 0 where there is no such tensor.
struct DispatchTensors {
  uintptr_t x = 0, probs = 0;
  int hidden = 0;
  int type = 0;  // DataType of x
  int fp8 = 0;   // 0: as it is; 1: FP8 with fp32 scales; 2: with power-of-two scales
};

struct CombineTensors {
  uintptr_t rows = 0, weights = 0, values = 0, out = 0, slot_values = 0;
  int hidden = 0;
  int type = 0;  // DataType of rows
};

// What notify told the host.
struct Counts {
  int status = 0;  // NotifyStatus
  int culprit = 0, worst_rows = 0, max_tokens = 0;
  int64_t capacity = 0;
  int num_rows = 0, num_rank_rows = 0, num_items = 0;
  std::vector<int64_t> expert_rows, expert_count;  // [L]
};

struct Fault {
  int rank, peer;
  std::string phase;
  uint64_t operation, expected, seen;
};

class Communicator {
 public:
  explicit Communicator(const CommunicatorConfig& config);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Symmetric memory for `max_tokens` tokens per rank; the old one must have been closed and
  // released on all ranks.
  SymmetricMemory& allocate(int64_t max_tokens, MemoryKind kind);
  void release_memory();
  SymmetricMemory& memory();

  // int32 words of a plan's memory, and the plan in such memory. With no rank rows and no items it
  // gets its lists later (set_lists).
  int64_t plan_words(int64_t num_tokens, int num_slots, int64_t rank_rows, int64_t items) const;
  PlanView plan(uintptr_t memory, int64_t num_tokens, int num_slots, int64_t rank_rows,
                int64_t items) const;

  // Each returns the operation's number, as a fault record would name it. All are asynchronous.
  // staged: what the dispatch that is to follow sends, staged on the way; null: that dispatch will.
  // capacity: rows a result may have; 0: as many as come.
  uint64_t notify(const PlanView& plan, const DispatchTensors* staged, uintptr_t topk_idx,
                  bool is_64_bit, bool report, int64_t capacity, const Launch& launch);
  // Between hosts: of the tokens of all hosts that concern this one; what it finds goes to
  // `verdict` in device memory, and the lists stay with their publishers. report: the host will
  // wait.
  uint64_t notify_hosts(const PlanView& plan, uintptr_t topk_idx, int64_t own_tokens,
                        uintptr_t verdict, bool report, int64_t capacity, const Launch& launch);
  void fetch_lists(const PlanView& plan, const Launch& launch);
  // First half of a dispatch, after a notify that has not staged: needs neither the plan's lists
  // nor its counts. Does nothing, on any rank, if that notify has failed.
  void stage(const PlanView& plan, const DispatchTensors& tensors, const Launch& launch);
  uint64_t dispatch(const PlanView& plan, const DispatchTensors& tensors, uintptr_t rows,
                    uintptr_t row_probs, uintptr_t row_scales, const Launch& launch);
  uint64_t combine(const PlanView& plan, const CombineTensors& tensors, const Launch& launch);

  // Waits on the host for what the last notify with `report` found. No value: a fault.
  std::optional<Counts> wait_counts(const Launch& launch);

  // Whether the device has reported nothing: what the next three would tell.
  bool is_quiet() const {
    return host_->fault.state == 0 && host_->bad_peer == 0 && host_->sticky_status == 0;
  }
  std::optional<Fault> fault() const;
  // Nanoseconds the last finished exchange of counts waited for the peer that came last, and that
  // peer. No value: there was none.
  std::optional<std::pair<int64_t, int>> last_wait() const;
  // A rank that reported bad input since the last call, or -1.
  int take_bad_peer();
  // What a notify that nobody waited for found wrong, as Counts with a status; kOk: nothing.
  Counts sticky() const;

  // What kernels see of it, for one launch.
  CommView view(const Launch& launch) const;

 private:
  PlanMemory layout_of_plan(int64_t num_tokens, int num_slots, int64_t rank_rows,
                            int64_t items) const;
  bool stages(const PlanView& plan, const DispatchTensors& tensors) const;
  StagedSource staged_source(const DispatchTensors& tensors) const;
  Counts read_counts() const;

  CommunicatorConfig config_;
  std::unique_ptr<SymmetricMemory> memory_;
  int64_t max_tokens_ = 0;  // of a rank, that memory is for
  Control* control_ = nullptr;
  HostState* host_ = nullptr;         // as the host sees it
  HostState* host_mapped_ = nullptr;  // as the device sees it
  int32_t* scratch_ = nullptr;
  uint64_t operations_ = 0;  // launched
};

}  // namespace moe_ep
