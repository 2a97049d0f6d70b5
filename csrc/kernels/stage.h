// stage: token rows into symmetric memory, where the peers pull them from. First half of a
// dispatch.
#pragma once

#include <cuda_runtime.h>

#include "shared/comm_view.h"
#include "shared/plan_layout.h"

namespace moe_ep {

struct StageArgs {
  CommView comm;
  PlanView plan;          // only its first half: the lists need not be there yet
  int32_t before_notify;  // 1: its counts neither; nobody can tell yet whether there will be rows
  const char* x;          // [T, H]
  const float* probs;     // [T, K] or null
  int64_t row_bytes;      // of x
  // FP8 only.
  DataType type;  // of x
  int32_t hidden;
  int32_t power_of_two_scales;
  char* rows_out;  // not null: rows are quantised to here and to scales_out, and nobody is told
  float* scales_out;
};

cudaError_t launch_stage(const StageArgs& args, int num_blocks, cudaStream_t stream);

// Quantises the rows to FP8 e4m3, one scale per 128 columns.
cudaError_t launch_stage_fp8(const StageArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace moe_ep
