// A rank's end of the low-latency exchange on one host: owns its memory, launches its kernels.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <optional>

#include "runtime/communicator.h"
#include "shared/low_latency_layout.h"

namespace moe_ep {

// Device addresses of one dispatch; 0 where there is no such tensor. See kernels/low_latency.h.
struct LowLatencyDispatchTensors {
  uintptr_t x = 0, topk_idx = 0;
  uintptr_t rows = 0, scales = 0, recv_count = 0, src_info = 0, slots = 0, layout_range = 0;
  uintptr_t expert_stats = 0, waiting_stats = 0;
  uintptr_t ticket = 0;
  bool topk_is_64_bit = true;
  int num_tokens = 0;
  int fp8 = 0;  // 0: bf16; 1: FP8 with fp32 scales; 2: with power-of-two scales
  bool pack_scales = false;
};

struct LowLatencyCombineTensors {
  uintptr_t x = 0, slots = 0, layout_range = 0;
  uintptr_t topk_idx = 0, topk_weights = 0, out = 0, waiting_stats = 0;
  uintptr_t ticket = 0;
  bool topk_is_64_bit = true;
  int num_tokens = 0;
};

class LowLatency {
 public:
  LowLatency(int device, int rank, int num_ranks);
  ~LowLatency();
  LowLatency(const LowLatency&) = delete;
  LowLatency& operator=(const LowLatency&) = delete;

  // Symmetric memory of `num_bytes` bytes.
  SymmetricMemory& allocate(int64_t num_bytes, MemoryKind kind);
  void release_memory();
  SymmetricMemory& memory();

  // All are asynchronous. `tag`: of the shape, the same on all ranks. A receive may follow its send
  // at any time before the second next send; both get the same tensors.
  void send_dispatch(const LowLatencyShape& shape, int tag,
                     const LowLatencyDispatchTensors& tensors, const Launch& launch);
  void receive_dispatch(const LowLatencyShape& shape, int tag,
                        const LowLatencyDispatchTensors& tensors, const Launch& launch);
  void send_combine(const LowLatencyShape& shape, int tag, const LowLatencyCombineTensors& tensors,
                    const Launch& launch);
  void receive_combine(const LowLatencyShape& shape, int tag,
                       const LowLatencyCombineTensors& tensors, const Launch& launch);

  // Whether the device has reported nothing: what the next two would tell.
  bool is_quiet() const { return host_->fault.state == 0 && host_->bad_peer == 0; }
  std::optional<Fault> fault() const;
  // A rank whose input was bad (this one, too, if an index was), or -1.
  int bad_peer() const { return static_cast<int>(host_->bad_peer) - 1; }

 private:
  struct Prepared;  // what every launch needs
  Prepared prepare(const LowLatencyShape& shape, int tag, const Launch& launch) const;

  int device_, rank_, num_ranks_;
  int64_t num_bytes_ = 0;
  std::unique_ptr<SymmetricMemory> memory_;
  Control* control_ = nullptr;
  int32_t* counts_ = nullptr;         // scratch of a send
  HostState* host_ = nullptr;         // as the host sees it
  HostState* host_mapped_ = nullptr;  // as the device sees it
};

}  // namespace moe_ep
