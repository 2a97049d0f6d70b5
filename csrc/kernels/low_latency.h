// Low-latency mode: dispatch and combine, each as a send and a receive that occupy nothing in
// between.
#pragma once

#include <cuda_runtime.h>

#include "shared/comm_view.h"
#include "shared/low_latency_layout.h"
#include "shared/row_shape.h"

namespace moe_ep {

// What a rank was doing when it waited; beside those of shared/control.h.
constexpr Phase kPhaseBufferFree = static_cast<Phase>(32);     // peers still read the buffer
constexpr Phase kPhaseDispatchReady = static_cast<Phase>(33);  // rows of the peer
constexpr Phase kPhaseCombineReady = static_cast<Phase>(34);   // expert rows of the peer

struct LowLatencyView {
  CommView comm;  // its layout and its limits are not used
  LowLatencyLayout layout;
  LowLatencyShape shape;
  uint32_t tag;  // of this kind of operation and shape, below 1 << kWordTagBits
};

// Indices of a row's source, and scales of a result, are laid out as DeepEP V1 does.
// N = R*Tmax rows per local expert.
struct LowLatencyDispatchArgs {
  LowLatencyView view;
  int32_t fp8;       // rows travel as FP8
  uint64_t* ticket;  // written by send, read by receive: the operation's number
  // Send.
  const char* x;         // [T, H] bf16
  const void* topk_idx;  // int32 or int64 [T, K], -1 unused
  int32_t topk_is_64_bit;
  int32_t num_tokens;           // T
  int32_t power_of_two_scales;  // FP8
  int32_t* counts;              // scratch [E+1]
  // Receive.
  char* rows;              // [L, N, H] bf16 or FP8
  void* scales;            // FP8: fp32 [L, H/128, N], or int32 [L, H/512, N] with pack_scales
  int32_t pack_scales;     // 1: four exponents in one int32
  int32_t* recv_count;     // [L]
  int32_t* src_info;       // [L, N] token of the source rank
  int32_t* slots;          // [L, N] token*K + k of the source rank
  int64_t* layout_range;   // [L, R] first row << 32 | rows
  int32_t* expert_stats;   // [L] or null: += rows
  int64_t* waiting_stats;  // [R] or null: += nanoseconds waited for the rank
};

struct LowLatencyCombineArgs {
  LowLatencyView view;
  uint64_t* ticket;
  // Send.
  const char* x;                // [L, N, H] bf16
  const int32_t* slots;         // of the dispatch
  const int64_t* layout_range;  // of the dispatch
  // Receive.
  const void* topk_idx;  // int32 or int64 [T, K]
  int32_t topk_is_64_bit;
  const float* topk_weights;  // [T, K]
  int32_t num_tokens;
  char* out;               // [T, H] bf16
  int64_t* waiting_stats;  // [R] or null
};

cudaError_t launch_low_latency_dispatch_send(const LowLatencyDispatchArgs& args, int num_blocks,
                                             cudaStream_t stream);
cudaError_t launch_low_latency_dispatch_receive(const LowLatencyDispatchArgs& args, int num_blocks,
                                                cudaStream_t stream);
cudaError_t launch_low_latency_combine_send(const LowLatencyCombineArgs& args, int num_blocks,
                                            cudaStream_t stream);
cudaError_t launch_low_latency_combine_receive(const LowLatencyCombineArgs& args, int num_blocks,
                                               cudaStream_t stream);

}  // namespace moe_ep
