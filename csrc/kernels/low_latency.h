// Low-latency mode: dispatch and combine, each with a send and a receive. One launch does either,
// with nothing on the GPU in between, or both.
#pragma once

#include <cuda_runtime.h>

#include "shared/comm_view.h"
#include "shared/divisor.h"
#include "shared/low_latency_hosts.h"
#include "shared/row_shape.h"

namespace moe_ep {

// What a rank was doing when it waited; beside those of shared/control.h.
constexpr Phase kPhaseBufferFree = static_cast<Phase>(32);     // peers still read the buffer
constexpr Phase kPhaseDispatchReady = static_cast<Phase>(33);  // rows of the peer
constexpr Phase kPhaseCombineReady = static_cast<Phase>(34);   // expert rows of the peer
// The caller's own signal that expert rows can be sent. In place of words the fault has: expected,
// local expert << 32 | block; seen, the signal.
constexpr Phase kPhaseBlockSignal = static_cast<Phase>(35);
constexpr Phase kPhasePing = static_cast<Phase>(36);  // the peer's answer

// Bits: what a launch does. One that does both waits for its own blocks as it does for its peers':
// all must be on the GPU together.
constexpr int kSend = 1, kReceive = 2;
constexpr int kLowLatencyThreads = 512;  // of a block

struct LowLatencyView {
  CommView comm;  // its layout and its limits are not used; ranks of other hosts have no address
  LowLatencyHosts hosts;
  LowLatencyBorder* border;  // null on one host
  LowLatencyLayout layout;
  LowLatencyShape shape;
  Divisor ranks, slots;  // R and K
  int32_t one_gpu;       // all ranks share a GPU: a release of its scope reaches them, and sooner
  uint32_t tag;          // of this kind of operation and shape, below 1 << kWordTagBits
  int32_t parts;         // kSend and kReceive
  uint64_t* ticket;      // written by a send alone, read by a receive alone: the operation's number
};

// Indices of a row's source, and scales of a result, are laid out as DeepEP V1 does.
// N = R*Tmax rows per local expert.
struct LowLatencyDispatchArgs {
  LowLatencyView view;
  int32_t fp8;  // rows travel as FP8
  // Send.
  const char* x;         // [T, H] bf16
  const void* topk_idx;  // int32 or int64 [T, K], -1 unused
  int32_t topk_is_64_bit;
  int32_t num_tokens;           // T
  Divisor stage_parts;          // of a row: 32 vectors of 16 bytes each
  int32_t power_of_two_scales;  // FP8
  int32_t* index;               // [T, K] written: Route::index, for the combine
  // Receive.
  RowShape row_shape;      // of the rows that travel
  Divisor pieces;          // of row_shape
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
  // Send.
  RowShape send_shape;
  Divisor send_pieces;          // of send_shape
  const char* x;                // [L, N, H] bf16
  const int32_t* slots;         // of the dispatch
  const int64_t* layout_range;  // of the dispatch
  int32_t expert_out;           // 1 or 2: x is that one of this rank's `expert_out`. 0: elsewhere
  // [L, blocks_per_expert] or null: block b of an expert, its rows from b*N/blocks_per_expert on,
  // may be sent once its signal has reached signal_value.
  const uint32_t* block_signals;
  int32_t blocks_per_expert;
  uint32_t signal_value;
  // Receive.
  RowShape sum_shape;
  Divisor sum_pieces;    // of sum_shape
  const void* topk_idx;  // int32 or int64 [T, K]
  int32_t topk_is_64_bit;
  const float* topk_weights;  // [T, K]
  const int32_t* index;       // [T, K] of the dispatch
  int32_t num_tokens;
  char* out;               // [T, H] bf16
  int64_t* waiting_stats;  // [R] or null
};

struct LowLatencyLaunch {
  int num_blocks;  // at most kMaxLowLatencyBlocks
  cudaStream_t stream;
  // Compute capability 9.0: the launch is made while the kernel ahead of it in the stream runs, and
  // waits for its end on the device.
  bool early;

  template <typename Args>
  cudaError_t run(void (*kernel)(Args), const Args& args) const {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(num_blocks);
    config.blockDim = dim3(kLowLatencyThreads);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, args);
  }
};

cudaError_t launch_low_latency_dispatch(const LowLatencyDispatchArgs& args,
                                        const LowLatencyLaunch& launch);
cudaError_t launch_low_latency_combine(const LowLatencyCombineArgs& args,
                                       const LowLatencyLaunch& launch);
// Waits until no peer reads that one (1 or 2) of this rank's `expert_out` any more.
cudaError_t launch_low_latency_wait_expert_out(const LowLatencyView& view, int expert_out,
                                               cudaStream_t stream);
// Sends a word to the peer and back, `rounds` times; the peer must do the same. first: above every
// number that the two have sent each other. nanoseconds: of one round, written.
cudaError_t launch_low_latency_ping(const LowLatencyView& view, int peer, uint64_t first,
                                    int rounds, int64_t* nanoseconds, cudaStream_t stream);

}  // namespace moe_ep
