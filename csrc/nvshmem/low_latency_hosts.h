// A rank's end of the low-latency exchange between hosts.
#pragma once

#include <vector>

#include "nvshmem/rail_exchange.h"
#include "runtime/low_latency.h"

namespace moe_ep {

class HostsLowLatency : public LowLatency {
 public:
  // by_slots: see shared/low_latency_hosts.h.
  HostsLowLatency(int device, int rank, int num_ranks, int ranks_per_host, bool by_slots);
  ~HostsLowLatency() override;

  // Bytes of a block of the NVSHMEM heap, where the caller asks for `num_bytes`.
  static int64_t block_bytes(int64_t num_bytes) { return low_latency_hosts_bytes(num_bytes); }
  // addresses: a zeroed block of every rank of this host, as mapped here; 0 for the others.
  void attach(const std::vector<uintptr_t>& addresses, int64_t num_bytes);

  // Waits for the device.
  Border border() const;

 protected:
  char* peer(int rank) const override { return peers_.at(rank); }
  void complete(LowLatencyView& view) const override;
  cudaError_t launch(const LowLatencyDispatchArgs& args,
                     const LowLatencyLaunch& launch) const override;
  cudaError_t launch(const LowLatencyCombineArgs& args,
                     const LowLatencyLaunch& launch) const override;

 private:
  LowLatencyHosts hosts_;
  LowLatencyBorder* border_ = nullptr;
  std::vector<char*> peers_;
};

}  // namespace moe_ep
