// notify: the exchange of counts that makes a plan.
#pragma once

#include <cuda_runtime.h>

#include "shared/comm_view.h"
#include "shared/plan_layout.h"
#include "shared/staged_source.h"

namespace moe_ep {

constexpr int kMaxNotifyBlocks = 32;  // that count; more can stage

// int32 words of scratch the kernel needs.
int64_t notify_scratch_words(int num_experts, int num_ranks);

struct NotifyArgs {
  CommView comm;
  PlanView plan;
  const void* topk_idx;  // int32 or int64 [T, K] expert ids of the whole group, -1 unused
  int32_t topk_is_64_bit;
  int32_t row_alignment;
  int64_t capacity;        // rows of the result at most; 0: no limit
  int32_t report_to_host;  // 1: the host waits for the counts of this call
  int32_t* scratch;
  int32_t stages;  // 1: the rows of the dispatch to follow are staged while counts travel
  StagedSource source;
  // Between hosts (csrc/nvshmem): `plan` is of the tokens of all hosts that concern this one, and
  // an expert has one block per host its rows come from, padded together.
  int32_t blocks_per_expert;  // 0 stands for 1
  NotifyVerdict* verdict;     // null: the host is told; else it goes there, in device memory
  int64_t own_tokens;         // with a verdict: tokens of this rank
  int64_t part_tokens;        // with a verdict: combine slots are numbered anew after so many
};

// To be called once per device before the first launch with these sizes.
cudaError_t prepare_notify(int num_experts, int num_ranks);

cudaError_t launch_notify(const NotifyArgs& args, int num_blocks, cudaStream_t stream);

// Copies what the sources published for this rank into a plan that got its second half only after
// notify; runs after it on its stream. Where the plan has both halves, notify does it.
struct FetchListsArgs {
  CommView comm;
  PlanView plan;
};

cudaError_t launch_fetch_lists(const FetchListsArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace moe_ep
