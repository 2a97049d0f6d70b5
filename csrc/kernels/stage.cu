// stage, and FP8 rows for kernels that do not stage.
#include "device/staging.cuh"
#include "kernels/stage.h"

namespace moe_ep {
namespace {

constexpr int kThreads = 512;

__global__ void __launch_bounds__(kThreads, 1)
    stage_kernel(const __grid_constant__ StageArgs args) {
  const CommView& comm = args.comm;
  if (is_aborted(comm) || !may_stage(comm, args.plan)) return;
  const StagingSlot slot = current_slot(comm);
  if (!stage_rows(comm, args.plan, args.source, slot)) return;
  if (arrive_last(&comm.control->arrived_stage)) signal_staged(comm, slot.operation);
}

__global__ void __launch_bounds__(kThreads, 1)
    quantize_kernel(const __grid_constant__ QuantizeArgs args) {
  quantize(args.source, args.num_tokens, args.rows, args.scales);
}

}  // namespace

cudaError_t launch_stage(const StageArgs& args, int num_blocks, cudaStream_t stream) {
  stage_kernel<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_quantize(const QuantizeArgs& args, int num_blocks, cudaStream_t stream) {
  quantize_kernel<<<num_blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moe_ep
