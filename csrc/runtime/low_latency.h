// A rank's end of the low-latency exchange on one host: owns its memory, launches its kernels.
// Between hosts nvshmem/low_latency_hosts.h takes its memory and its kernels from elsewhere.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <optional>

#include "kernels/low_latency.h"
#include "runtime/communicator.h"

namespace moe_ep {

// What one launch is about. `tag`: of the shape, the same on all ranks. `parts`: kSend, kReceive or
// both, of kernels/low_latency.h. `ticket`: device address of 8 bytes that a send alone leaves for
// the receive of the same operation, which may follow at any time before the second next send; both
// get the same tensors.
struct LowLatencyCall {
  LowLatencyShape shape;
  int tag;
  int parts;
  uintptr_t ticket;
};

// Device addresses of one dispatch; 0 where there is no such tensor. See kernels/low_latency.h.
struct LowLatencyDispatchTensors {
  uintptr_t x = 0, topk_idx = 0, index = 0;
  uintptr_t rows = 0, scales = 0, recv_count = 0, src_info = 0, slots = 0, layout_range = 0;
  uintptr_t expert_stats = 0, waiting_stats = 0;
  bool topk_is_64_bit = true;
  int num_tokens = 0;
  int fp8 = 0;  // 0: bf16; 1: FP8 with fp32 scales; 2: with power-of-two scales
  bool pack_scales = false;
};

struct LowLatencyCombineTensors {
  uintptr_t x = 0, slots = 0, layout_range = 0, index = 0;
  uintptr_t topk_idx = 0, topk_weights = 0, out = 0, waiting_stats = 0;
  uintptr_t block_signals = 0;
  int blocks_per_expert = 1, signal_value = 1;
  int expert_out = 0;
  bool topk_is_64_bit = true;
  int num_tokens = 0;
};

class LowLatency {
 public:
  LowLatency(int device, int rank, int num_ranks);
  virtual ~LowLatency();
  LowLatency(const LowLatency&) = delete;
  LowLatency& operator=(const LowLatency&) = delete;

  // Symmetric memory of `num_bytes` bytes.
  SymmetricMemory& allocate(int64_t num_bytes, MemoryKind kind);
  void release_memory();
  SymmetricMemory& memory() const;

  // Whether all ranks share one GPU; false until it is told.
  void set_one_gpu(bool one_gpu) { one_gpu_ = one_gpu; }

  // Both are asynchronous.
  void dispatch(const LowLatencyCall& call, const LowLatencyDispatchTensors& tensors,
                const Launch& launch);
  void combine(const LowLatencyCall& call, const LowLatencyCombineTensors& tensors,
               const Launch& launch);

  // Address of [L, R*Tmax, H] bf16 that a combine can send from without a copy; which: 1 or 2. 0:
  // none, where the shape has too many rows.
  uintptr_t expert_out(const LowLatencyShape& shape, int which);
  // Makes the stream wait until no peer reads it any more.
  void wait_expert_out(const LowLatencyShape& shape, int which, const Launch& launch);

  // Measures how long a signal takes to `peer` and back, which must make the same call; what is
  // measured is written to the device address `nanoseconds`, int64.
  void ping(const LowLatencyShape& shape, int peer, int rounds, uintptr_t nanoseconds,
            const Launch& launch);

  // Whether the device has reported nothing: what the next two would tell.
  bool is_quiet() const { return host_->fault.state == 0 && host_->bad_peer == 0; }
  std::optional<Fault> fault() const;
  // A rank whose input was bad (this one, too, if an index was), or -1.
  int bad_peer() const { return static_cast<int>(host_->bad_peer) - 1; }

 protected:
  // A rank's memory as mapped here; null on another host.
  virtual char* peer(int rank) const;
  // Says where ranks are; the rest of the view is set.
  virtual void complete(LowLatencyView& view) const;
  virtual cudaError_t launch(const LowLatencyDispatchArgs& args,
                             const LowLatencyLaunch& launch) const;
  virtual cudaError_t launch(const LowLatencyCombineArgs& args,
                             const LowLatencyLaunch& launch) const;

  int device_;
  int64_t num_bytes_ = 0;

 private:
  struct Prepared;  // what every launch needs
  Prepared prepare(const LowLatencyCall& call, const Launch& launch) const;

  int rank_, num_ranks_;
  bool early_ = false;  // LowLatencyLaunch::early
  bool one_gpu_ = false;
  uint64_t pings_[kMaxRanks] = {};  // words that were exchanged with each peer
  std::unique_ptr<SymmetricMemory> memory_;
  Control* control_ = nullptr;
  HostState* host_ = nullptr;         // as the host sees it
  HostState* host_mapped_ = nullptr;  // as the device sees it
};

}  // namespace moe_ep
