#include "nvshmem/low_latency_hosts.h"

#include <stdexcept>
#include <string>

#include "nvshmem/low_latency_kernels.h"
#include "runtime/error.h"

namespace moe_ep {

HostsLowLatency::HostsLowLatency(int device, int rank, int num_ranks, int ranks_per_host,
                                 bool by_slots)
    : LowLatency(device, rank, num_ranks), hosts_{num_ranks, ranks_per_host, by_slots} {
  if (ranks_per_host < 1 || num_ranks % ranks_per_host != 0) {
    throw std::invalid_argument(std::to_string(num_ranks) + " ranks on hosts of " +
                                std::to_string(ranks_per_host));
  }
  check_cuda(cudaMalloc(&border_, sizeof(LowLatencyBorder)), "cudaMalloc");
  check_cuda(cudaMemset(border_, 0, sizeof(LowLatencyBorder)), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

HostsLowLatency::~HostsLowLatency() {
  if (cudaSetDevice(device_) == cudaSuccess) cudaFree(border_);
  cudaGetLastError();
}

void HostsLowLatency::attach(const std::vector<uintptr_t>& addresses, int64_t num_bytes) {
  if (static_cast<int>(addresses.size()) != hosts_.num_ranks) {
    throw std::invalid_argument("one address for each rank is needed");
  }
  peers_.clear();
  for (const uintptr_t address : addresses) peers_.push_back(reinterpret_cast<char*>(address));
  num_bytes_ = num_bytes;
}

void HostsLowLatency::complete(LowLatencyView& view) const {
  view.hosts = hosts_;
  view.border = border_;
  // A message count of one operation must fit a word.
  const int64_t local = view.shape.num_experts / view.shape.num_ranks;
  if (local * view.shape.max_tokens + kMaxLowLatencyBlocks > kMaxLowLatencyTokens) {
    throw std::invalid_argument(
        "num_max_dispatch_tokens_per_rank=" + std::to_string(view.shape.max_tokens) + " with " +
        std::to_string(local) + " experts on a rank; between hosts their product can be at most " +
        std::to_string(kMaxLowLatencyTokens - kMaxLowLatencyBlocks));
  }
}

cudaError_t HostsLowLatency::launch(const LowLatencyDispatchArgs& args,
                                    const LowLatencyLaunch& launch) const {
  return launch_hosts_dispatch(args, launch);
}

cudaError_t HostsLowLatency::launch(const LowLatencyCombineArgs& args,
                                    const LowLatencyLaunch& launch) const {
  return launch_hosts_combine(args, launch);
}

Border HostsLowLatency::border() const {
  LowLatencyBorder now{};
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check_cuda(cudaMemcpy(&now, border_, sizeof(now), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return {now.rows, now.bytes, now.other_bytes};
}

}  // namespace moe_ep
