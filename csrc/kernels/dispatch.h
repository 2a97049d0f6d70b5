// dispatch: staged token rows to expert rows.
#pragma once

#include <cuda_runtime.h>

#include "shared/comm_view.h"
#include "shared/plan_layout.h"
#include "shared/row_shape.h"

namespace moe_ep {

struct DispatchArgs {
  CommView comm;
  PlanView plan;
  RowShape shape;      // of a row as it is stored; FP8 turned back: in vectors of 8 columns
  const char* x;       // [T, H]
  const float* probs;  // [T, K] or null
  char* rows;          // [N, H]
  float* row_probs;    // [N], null without probs
  int32_t own_staged;  // 1: this rank's own rows are to be read from its stage too
  // FP8 only.
  float* row_scales;  // [N, H/128]; null: rows are turned back into the type of x
  DataType type;      // of x
  int32_t hidden;
};

cudaError_t launch_dispatch(const DispatchArgs& args, int num_blocks, cudaStream_t stream);

// Of rows staged as FP8. The result is FP8 with scales, or in the type of x.
cudaError_t launch_dispatch_fp8(const DispatchArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace moe_ep
