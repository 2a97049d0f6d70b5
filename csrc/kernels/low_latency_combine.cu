#include "kernels/low_latency_combine.cuh"

namespace moe_ep {
namespace {

__global__ void low_latency_wait_kernel(const __grid_constant__ LowLatencyView view,
                                        int expert_out) {
  if (is_aborted(view.comm)) return;
  const Control* control = view.comm.control;
  poll_received(view, control->operation, control->stage_operation[expert_out - 1],
                kMaxLowLatencyBlocks);
}

}  // namespace

cudaError_t launch_low_latency_combine(const LowLatencyCombineArgs& args,
                                       const LowLatencyLaunch& launch) {
  return launch.run(low_latency_combine_kernel<OneHost>, args);
}

cudaError_t launch_low_latency_wait_expert_out(const LowLatencyView& view, int expert_out,
                                               cudaStream_t stream) {
  low_latency_wait_kernel<<<1, kLowLatencyThreads, 0, stream>>>(view, expert_out);
  return cudaGetLastError();
}

}  // namespace moe_ep
