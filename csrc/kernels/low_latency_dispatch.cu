#include "kernels/low_latency_dispatch.cuh"

namespace moe_ep {

cudaError_t launch_low_latency_dispatch(const LowLatencyDispatchArgs& args,
                                        const LowLatencyLaunch& launch) {
  return launch_dispatch<OneHost>(args, launch);
}

}  // namespace moe_ep
