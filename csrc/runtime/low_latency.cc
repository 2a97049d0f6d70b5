#include "runtime/low_latency.h"

#include <atomic>
#include <new>

#include "kernels/low_latency.h"
#include "runtime/error.h"

namespace moe_ep {
namespace {

const char* phase_name(Phase phase) {
  switch (phase) {
    case kPhaseBufferFree:
      return "a low-latency send (its buffer free)";
    case kPhaseDispatchReady:
      return "low_latency_dispatch (rows)";
    case kPhaseCombineReady:
      return "low_latency_combine (expert rows)";
    default:
      return "no phase";
  }
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// The marks of SymmetricMemory lie at the front, and `rank_rows` ends what must start at zero.
SymmetricLayout memory_layout(int64_t num_bytes) {
  SymmetricLayout layout{};
  layout.rank_rows = low_latency_layout({1, 1, 1, 8, 1}, num_bytes).signal_bytes;
  layout.total = num_bytes;
  return layout;
}

void check(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

void check_shape(const LowLatencyShape& shape, int num_ranks, int tag) {
  check(shape.num_ranks == num_ranks, "the shape is for another number of ranks");
  check(shape.num_experts >= num_ranks && shape.num_experts <= kMaxExperts &&
            shape.num_experts % num_ranks == 0,
        "num_experts must be a multiple of the ranks, at most 2048");
  check(shape.num_slots >= 1 && shape.num_slots <= max_low_latency_slots(shape.num_experts),
        "top-k must be 1 to 32 and at most num_experts");
  check(shape.hidden >= 8 && shape.hidden % 8 == 0, "hidden must be a multiple of 8");
  check(shape.max_tokens >= 1 && shape.max_tokens <= kMaxLowLatencyTokens, "max_tokens");
  check(tag >= 0 && tag < 1 << kWordTagBits, "tag");
}

}  // namespace

struct LowLatency::Prepared {
  LowLatencyView view;
  cudaStream_t stream;
};

LowLatency::LowLatency(int device, int rank, int num_ranks)
    : device_(device), rank_(rank), num_ranks_(num_ranks) {
  check(num_ranks >= 1 && num_ranks <= kMaxRanks && rank >= 0 && rank < num_ranks,
        "1 to 64 ranks are supported");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  check_cuda(cudaMalloc(&control_, sizeof(Control)), "cudaMalloc");
  check_cuda(cudaMemset(control_, 0, sizeof(Control)), "cudaMemset");
  check_cuda(cudaMalloc(&counts_, (kMaxExperts + 1) * sizeof(int32_t)), "cudaMalloc");
  void* host = nullptr;
  check_cuda(cudaHostAlloc(&host, sizeof(HostState), cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc");
  host_ = new (host) HostState{};
  check_cuda(cudaHostGetDevicePointer(reinterpret_cast<void**>(&host_mapped_), host, 0),
             "cudaHostGetDevicePointer");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

LowLatency::~LowLatency() {
  // As for Communicator: memory that peers may still use stays until the process ends.
  if (num_ranks_ > 1) static_cast<void>(memory_.release());
  memory_.reset();
  if (cudaSetDevice(device_) == cudaSuccess) {
    cudaFree(control_);
    cudaFree(counts_);
    cudaFreeHost(host_);
  }
  cudaGetLastError();
}

SymmetricMemory& LowLatency::allocate(int64_t num_bytes, MemoryKind kind) {
  const SymmetricLayout layout = memory_layout(num_bytes);
  check(num_bytes > layout.rank_rows, "the memory has no room for its signals");
  SymmetricShape shape{};
  shape.num_ranks = num_ranks_;
  memory_.reset();
  memory_ = std::make_unique<SymmetricMemory>(device_, rank_, shape, layout, kind);
  num_bytes_ = num_bytes;
  return *memory_;
}

void LowLatency::release_memory() { memory_.reset(); }

SymmetricMemory& LowLatency::memory() {
  if (memory_ == nullptr) throw std::runtime_error("no symmetric memory is allocated");
  return *memory_;
}

LowLatency::Prepared LowLatency::prepare(const LowLatencyShape& shape, int tag,
                                         const Launch& launch) const {
  if (memory_ == nullptr) throw std::runtime_error("no symmetric memory is allocated");
  check_shape(shape, num_ranks_, tag);
  check(launch.num_sms >= 1, "num_sms must be at least 1");
  const LowLatencyLayout layout = low_latency_layout(shape, num_bytes_);
  check(layout.total <= num_bytes_, "the shape needs more memory than there is");
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  LowLatencyView view{};
  view.comm.rank = rank_;
  view.comm.num_ranks = num_ranks_;
  view.comm.bad_input = launch.bad_input;
  view.comm.timeout_ns = static_cast<uint64_t>(launch.timeout_s * 1e9);
  view.comm.control = control_;
  view.comm.host = host_mapped_;
  for (int i = 0; i < num_ranks_; ++i) view.comm.peers[i] = memory_->peer(i);
  view.layout = layout;
  view.shape = shape;
  view.tag = static_cast<uint32_t>(tag);
  return {view, pointer<CUstream_st>(launch.stream)};
}

namespace {

LowLatencyDispatchArgs dispatch_args(const LowLatencyView& view,
                                     const LowLatencyDispatchTensors& tensors, int32_t* counts) {
  check(tensors.x % kVectorBytes == 0 && tensors.rows % kVectorBytes == 0,
        "x and the result must be aligned to 16 bytes");
  check(tensors.num_tokens >= 0 && tensors.num_tokens <= view.shape.max_tokens,
        "more tokens than num_max_dispatch_tokens_per_rank");
  check(tensors.fp8 == 0 || view.shape.hidden % kFp8Block == 0,
        "FP8 needs a hidden size that is a multiple of 128");
  LowLatencyDispatchArgs args{};
  args.view = view;
  args.fp8 = tensors.fp8 != 0;
  args.ticket = pointer<uint64_t>(tensors.ticket);
  args.x = pointer<const char>(tensors.x);
  args.topk_idx = pointer<const void>(tensors.topk_idx);
  args.topk_is_64_bit = tensors.topk_is_64_bit;
  args.num_tokens = tensors.num_tokens;
  args.power_of_two_scales = tensors.fp8 == 2;
  args.counts = counts;
  args.rows = pointer<char>(tensors.rows);
  args.scales = pointer<void>(tensors.scales);
  args.pack_scales = tensors.pack_scales;
  args.recv_count = pointer<int32_t>(tensors.recv_count);
  args.src_info = pointer<int32_t>(tensors.src_info);
  args.slots = pointer<int32_t>(tensors.slots);
  args.layout_range = pointer<int64_t>(tensors.layout_range);
  args.expert_stats = pointer<int32_t>(tensors.expert_stats);
  args.waiting_stats = pointer<int64_t>(tensors.waiting_stats);
  return args;
}

LowLatencyCombineArgs combine_args(const LowLatencyView& view,
                                   const LowLatencyCombineTensors& tensors) {
  check(tensors.x % kVectorBytes == 0 && tensors.out % kVectorBytes == 0,
        "x and the result must be aligned to 16 bytes");
  check(tensors.num_tokens >= 0 && tensors.num_tokens <= view.shape.max_tokens,
        "more tokens than num_max_dispatch_tokens_per_rank");
  LowLatencyCombineArgs args{};
  args.view = view;
  args.ticket = pointer<uint64_t>(tensors.ticket);
  args.x = pointer<const char>(tensors.x);
  args.slots = pointer<const int32_t>(tensors.slots);
  args.layout_range = pointer<const int64_t>(tensors.layout_range);
  args.topk_idx = pointer<const void>(tensors.topk_idx);
  args.topk_is_64_bit = tensors.topk_is_64_bit;
  args.topk_weights = pointer<const float>(tensors.topk_weights);
  args.num_tokens = tensors.num_tokens;
  args.out = pointer<char>(tensors.out);
  args.waiting_stats = pointer<int64_t>(tensors.waiting_stats);
  return args;
}

}  // namespace

void LowLatency::send_dispatch(const LowLatencyShape& shape, int tag,
                               const LowLatencyDispatchTensors& tensors, const Launch& launch) {
  const Prepared prepared = prepare(shape, tag, launch);
  const LowLatencyDispatchArgs args = dispatch_args(prepared.view, tensors, counts_);
  check_cuda(launch_low_latency_dispatch_send(args, launch.num_sms, prepared.stream),
             "low-latency dispatch send kernel");
}

void LowLatency::receive_dispatch(const LowLatencyShape& shape, int tag,
                                  const LowLatencyDispatchTensors& tensors, const Launch& launch) {
  const Prepared prepared = prepare(shape, tag, launch);
  const LowLatencyDispatchArgs args = dispatch_args(prepared.view, tensors, counts_);
  check_cuda(launch_low_latency_dispatch_receive(args, launch.num_sms, prepared.stream),
             "low-latency dispatch receive kernel");
}

void LowLatency::send_combine(const LowLatencyShape& shape, int tag,
                              const LowLatencyCombineTensors& tensors, const Launch& launch) {
  const Prepared prepared = prepare(shape, tag, launch);
  const LowLatencyCombineArgs args = combine_args(prepared.view, tensors);
  check_cuda(launch_low_latency_combine_send(args, launch.num_sms, prepared.stream),
             "low-latency combine send kernel");
}

void LowLatency::receive_combine(const LowLatencyShape& shape, int tag,
                                 const LowLatencyCombineTensors& tensors, const Launch& launch) {
  const Prepared prepared = prepare(shape, tag, launch);
  const LowLatencyCombineArgs args = combine_args(prepared.view, tensors);
  check_cuda(launch_low_latency_combine_receive(args, launch.num_sms, prepared.stream),
             "low-latency combine receive kernel");
}

std::optional<Fault> LowLatency::fault() const {
  const FaultRecord& record = host_->fault;
  if (record.state == 0) return std::nullopt;
  std::atomic_thread_fence(std::memory_order_acquire);
  return Fault{record.rank,      record.peer,     phase_name(record.phase),
               record.operation, record.expected, record.seen};
}

}  // namespace moe_ep
