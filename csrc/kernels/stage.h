// stage: token rows into symmetric memory, where the peers pull them from. First half of a dispatch
// whose routing is known; of another, notify does it on the way.
#pragma once

#include <cuda_runtime.h>

#include "shared/comm_view.h"
#include "shared/plan_layout.h"
#include "shared/staged_source.h"

namespace moe_ep {

struct StageArgs {
  CommView comm;
  PlanView plan;  // only its first half: the lists need not be there yet
  StagedSource source;
};

cudaError_t launch_stage(const StageArgs& args, int num_blocks, cudaStream_t stream);

// For rows that other kernels send: nobody is told.
struct QuantizeArgs {
  StagedSource source;
  int64_t num_tokens;
  char* rows;     // [T, H] FP8
  float* scales;  // [T, H/128]
};

cudaError_t launch_quantize(const QuantizeArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace moe_ep
