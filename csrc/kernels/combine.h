// combine: expert rows back to token rows, summed.
#pragma once

#include <cuda_runtime.h>

#include "shared/comm_view.h"
#include "shared/plan_layout.h"
#include "shared/row_shape.h"

namespace moe_ep {

struct CombineArgs {
  CommView comm;
  PlanView plan;
  RowShape shape;
  DataType type;
  int32_t exact;         // 1: every expert row is sent and summed at the source, in k order
  const char* rows;      // [N, H]
  const float* weights;  // [N] or null
  const float* values;   // [N] or null: carried to their slots
  char* out;             // [T, H]
  float* slot_values;    // [T, K], null without values
};

cudaError_t launch_combine(const CombineArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace moe_ep
