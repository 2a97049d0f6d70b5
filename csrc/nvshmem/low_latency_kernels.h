// As launch_low_latency_dispatch and launch_low_latency_combine, for ranks on several hosts.
#pragma once

#include "kernels/low_latency.h"

namespace moe_ep {

cudaError_t launch_hosts_dispatch(const LowLatencyDispatchArgs& args,
                                  const LowLatencyLaunch& launch);
cudaError_t launch_hosts_combine(const LowLatencyCombineArgs& args, const LowLatencyLaunch& launch);

}  // namespace moe_ep
