// stage of rows as they are: a copy.
#include "device/staging.cuh"
#include "kernels/stage.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads, 1)
    stage_kernel(const __grid_constant__ StageArgs args) {
  const CommView& comm = args.comm;
  const PlanView& plan = args.plan;
  if (is_aborted(comm) || !may_stage(comm, plan, args.before_notify)) return;
  const StagingSlot slot = current_slot(comm, args.before_notify);
  if (!stage_as_is(comm, plan, slot, args.x, args.probs, args.row_bytes)) return;
  publish_stage(comm, slot);
}

}  // namespace

cudaError_t launch_stage(const StageArgs& args, int num_blocks, cudaStream_t stream) {
  stage_kernel<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moe_ep
