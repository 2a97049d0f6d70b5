// The kernels of an exchange between hosts. In the order of the stream, on every rank:
//   notify:   exchange_routing, the notify kernel of the core, agree, cut_lists, fetch_chunks
//   dispatch: for each chunk send_rows, stage_rows, the dispatch kernel of the core
//   combine:  for each chunk the combine kernel of the core, return_sums, add_sums
#pragma once

#include <cuda_runtime.h>

#include "shared/comm_view.h"
#include "shared/plan_layout.h"
#include "shared/rail_view.h"
#include "shared/row_shape.h"

namespace moe_ep {

// Expert ids of this rank's tokens to its rail, and those of the rail as the notify kernel of this
// host wants them: only experts of this host, each numbered expert*n + source host.
struct RoutingArgs {
  CommView comm;
  RailView rail;
  const void* topk_idx;  // int32 or int64 [T, num_slots] expert slots of the whole group
  int32_t topk_is_64_bit;
  int32_t num_slots;        // at most the shape's K
  int64_t num_tokens;       // T
  int32_t* expert_of_slot;  // [T, K] out
  int32_t* host_topk;       // [chunks][n*C][K] out
};
cudaError_t launch_exchange_routing(const RoutingArgs& args, int num_blocks, cudaStream_t stream);

// All hosts come to one verdict; one that is not good empties the plan.
struct AgreeArgs {
  CommView comm;
  RailView rail;
  PlanView plan;  // of all chunks
  int64_t capacity;
  int32_t report_to_host;
};
cudaError_t launch_agree(const AgreeArgs& args, cudaStream_t stream);

// The lists of a plan, cut into chunks: rank rows chunk by chunk, token, slot and items' slots
// counted within the chunk.
struct ListsArgs {
  CommView comm;
  PlanView plan;  // of all chunks, with room for the lists
  int32_t num_chunks;
  int64_t part_tokens;     // n*C
  int32_t* cuts;           // [ranks of the host][chunks + 1] out
  int32_t* chunk_headers;  // [chunks][header words] out
};
cudaError_t launch_fetch_chunks(const ListsArgs& args, int num_blocks, cudaStream_t stream);

// One chunk of a dispatch.
struct RowsArgs {
  CommView comm;
  RailView rail;
  PlanView plan;          // of this chunk
  const int32_t* status;  // NotifyStatus of the plan
  const int32_t* expert_of_slot;
  const char* x;        // [T][row_bytes]
  const float* scales;  // [T, num_scales] or null
  const float* probs;   // [T, K] or null
  int64_t row_bytes;
  int32_t num_scales;
  int64_t num_tokens;   // T
  int64_t first_token;  // of the chunk
};
cudaError_t launch_send_rows(const RowsArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_stage_rows(const RowsArgs& args, int num_blocks, cudaStream_t stream);

// One chunk of a combine.
struct SumsArgs {
  CommView comm;
  RailView rail;
  PlanView plan;  // of this chunk
  const int32_t* status;
  const int32_t* expert_of_slot;
  const char* sums;     // [n*C][row bytes] of this host, in the NVSHMEM heap
  const float* values;  // [n*C, K] or null, likewise
  char* out;            // [T, H]
  float* slot_values;   // [T, K] or null
  RowShape row;
  DataType type;
  int64_t num_tokens;
  int64_t first_token;
};
cudaError_t launch_return_sums(const SumsArgs& args, int num_blocks, cudaStream_t stream);
cudaError_t launch_add_sums(const SumsArgs& args, int num_blocks, cudaStream_t stream);

}  // namespace moe_ep
