#include "runtime/low_latency.h"

#include <atomic>
#include <new>

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
    case kPhaseBlockSignal:
      return "low_latency_combine (block_signals)";
    case kPhasePing:
      return "the exchange of a signal (its answer)";
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
  int major = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "cudaDeviceGetAttribute");
  early_ = major >= 9;
  check_cuda(cudaMalloc(&control_, sizeof(Control)), "cudaMalloc");
  check_cuda(cudaMemset(control_, 0, sizeof(Control)), "cudaMemset");
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

SymmetricMemory& LowLatency::memory() const {
  if (memory_ == nullptr) throw std::runtime_error("no symmetric memory is allocated");
  return *memory_;
}

char* LowLatency::peer(int rank) const { return memory().peer(rank); }

void LowLatency::complete(LowLatencyView& view) const { view.hosts = {num_ranks_, num_ranks_, 0}; }

cudaError_t LowLatency::launch(const LowLatencyDispatchArgs& args,
                               const LowLatencyLaunch& launch) const {
  return launch_low_latency_dispatch(args, launch);
}

cudaError_t LowLatency::launch(const LowLatencyCombineArgs& args,
                               const LowLatencyLaunch& launch) const {
  return launch_low_latency_combine(args, launch);
}

LowLatency::Prepared LowLatency::prepare(const LowLatencyCall& call, const Launch& launch) const {
  check_shape(call.shape, num_ranks_, call.tag);
  check(launch.num_sms >= 1 && launch.num_sms <= kMaxLowLatencyBlocks, "num_sms must be 1 to 255");
  LowLatencyView view{};
  view.layout = low_latency_layout(call.shape, num_bytes_);
  check(view.layout.total <= num_bytes_, "the shape needs more memory than there is");
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  view.comm.rank = rank_;
  view.comm.num_ranks = num_ranks_;
  view.comm.bad_input = launch.bad_input;
  view.comm.timeout_ns = static_cast<uint64_t>(launch.timeout_s * 1e9);
  view.comm.control = control_;
  view.comm.host = host_mapped_;
  for (int i = 0; i < num_ranks_; ++i) view.comm.peers[i] = peer(i);
  view.shape = call.shape;
  view.ranks = divide_by(num_ranks_);
  view.slots = divide_by(call.shape.num_slots);
  view.one_gpu = one_gpu_;
  view.tag = static_cast<uint32_t>(call.tag);
  view.parts = call.parts;
  view.ticket = pointer<uint64_t>(call.ticket);
  complete(view);
  return {view, pointer<CUstream_st>(launch.stream)};
}

namespace {

// Rows in pieces, so that `num_rows` of them give work to all warps of the launch.
RowShape pieces_of(int64_t row_bytes, int64_t num_rows, const Launch& launch) {
  const int64_t warps = static_cast<int64_t>(launch.num_sms) * (kLowLatencyThreads / kWarp);
  return row_shape(row_bytes, num_rows < warps && num_rows > 0 ? warps / num_rows : 1);
}

void check_tensors(uintptr_t x, uintptr_t result, int num_tokens, const LowLatencyShape& shape) {
  check(x % kVectorBytes == 0 && result % kVectorBytes == 0,
        "x and the result must be aligned to 16 bytes");
  check(num_tokens >= 0 && num_tokens <= shape.max_tokens,
        "more tokens than num_max_dispatch_tokens_per_rank");
}

}  // namespace

void LowLatency::dispatch(const LowLatencyCall& call, const LowLatencyDispatchTensors& tensors,
                          const Launch& launch) {
  const Prepared prepared = prepare(call, launch);
  const LowLatencyShape& shape = call.shape;
  check_tensors(tensors.x, tensors.rows, tensors.num_tokens, shape);
  check(tensors.fp8 == 0 || shape.hidden % kFp8Block == 0,
        "FP8 needs a hidden size that is a multiple of 128");
  const int64_t row_bytes = tensors.fp8 != 0 ? shape.hidden : prepared.view.layout.row_bytes;
  LowLatencyDispatchArgs args{};
  args.view = prepared.view;
  args.fp8 = tensors.fp8 != 0;
  args.x = pointer<const char>(tensors.x);
  args.topk_idx = pointer<const void>(tensors.topk_idx);
  args.topk_is_64_bit = tensors.topk_is_64_bit;
  args.num_tokens = tensors.num_tokens;
  args.stage_parts = divide_by(
      static_cast<uint32_t>(ceil_div(prepared.view.layout.row_bytes / kVectorBytes, kWarp)));
  args.power_of_two_scales = tensors.fp8 == 2;
  args.index = pointer<int32_t>(tensors.index);
  args.row_shape =
      pieces_of(row_bytes, static_cast<int64_t>(num_ranks_) * shape.max_tokens, launch);
  args.pieces = divide_by(args.row_shape.pieces);
  args.rows = pointer<char>(tensors.rows);
  args.scales = pointer<void>(tensors.scales);
  args.pack_scales = tensors.pack_scales;
  args.recv_count = pointer<int32_t>(tensors.recv_count);
  args.src_info = pointer<int32_t>(tensors.src_info);
  args.slots = pointer<int32_t>(tensors.slots);
  args.layout_range = pointer<int64_t>(tensors.layout_range);
  args.expert_stats = pointer<int32_t>(tensors.expert_stats);
  args.waiting_stats = pointer<int64_t>(tensors.waiting_stats);
  check_cuda(this->launch(args, LowLatencyLaunch{launch.num_sms, prepared.stream, early_}),
             "low-latency dispatch kernel");
}

void LowLatency::combine(const LowLatencyCall& call, const LowLatencyCombineTensors& tensors,
                         const Launch& launch) {
  const Prepared prepared = prepare(call, launch);
  const LowLatencyShape& shape = call.shape;
  check_tensors(tensors.x, tensors.out, tensors.num_tokens, shape);
  check(tensors.blocks_per_expert >= 1 && tensors.signal_value >= 1, "block signals");
  check(tensors.expert_out == 0 || tensors.x == expert_out(shape, tensors.expert_out),
        "x is not the memory that it is said to be");
  const int64_t row_bytes = prepared.view.layout.row_bytes;
  LowLatencyCombineArgs args{};
  args.view = prepared.view;
  args.send_shape =
      pieces_of(row_bytes, static_cast<int64_t>(tensors.num_tokens) * shape.num_slots, launch);
  args.x = pointer<const char>(tensors.x);
  args.slots = pointer<const int32_t>(tensors.slots);
  args.layout_range = pointer<const int64_t>(tensors.layout_range);
  args.expert_out = tensors.expert_out;
  args.block_signals = pointer<const uint32_t>(tensors.block_signals);
  args.blocks_per_expert = tensors.blocks_per_expert;
  args.signal_value = static_cast<uint32_t>(tensors.signal_value);
  args.sum_shape = pieces_of(row_bytes, tensors.num_tokens, launch);
  args.send_pieces = divide_by(args.send_shape.pieces);
  args.sum_pieces = divide_by(args.sum_shape.pieces);
  args.topk_idx = pointer<const void>(tensors.topk_idx);
  args.topk_is_64_bit = tensors.topk_is_64_bit;
  args.topk_weights = pointer<const float>(tensors.topk_weights);
  args.index = pointer<const int32_t>(tensors.index);
  args.num_tokens = tensors.num_tokens;
  args.out = pointer<char>(tensors.out);
  args.waiting_stats = pointer<int64_t>(tensors.waiting_stats);
  check_cuda(this->launch(args, LowLatencyLaunch{launch.num_sms, prepared.stream, early_}),
             "low-latency combine kernel");
}

uintptr_t LowLatency::expert_out(const LowLatencyShape& shape, int which) {
  check(which == 1 || which == 2, "there are two of them, 1 and 2");
  const int64_t num_rows = static_cast<int64_t>(num_ranks_) * shape.max_tokens;
  if (num_rows > kMaxPlaceBegin) return 0;
  const LowLatencyLayout layout = low_latency_layout(shape, num_bytes_);
  check(layout.total <= num_bytes_, "the shape needs more memory than there is");
  return reinterpret_cast<uintptr_t>(peer(rank_)) + layout.buffers[which - 1].expert_out;
}

void LowLatency::wait_expert_out(const LowLatencyShape& shape, int which, const Launch& launch) {
  const Prepared prepared = prepare({shape, 0, 0, 0}, launch);
  check_cuda(launch_low_latency_wait_expert_out(prepared.view, which, prepared.stream),
             "low-latency wait kernel");
}

void LowLatency::ping(const LowLatencyShape& shape, int peer, int rounds, uintptr_t nanoseconds,
                      const Launch& launch) {
  check(peer >= 0 && peer < num_ranks_ && peer != rank_ && rounds >= 1, "a peer and rounds");
  const Prepared prepared = prepare({shape, 0, 0, 0}, launch);
  check_cuda(launch_low_latency_ping(prepared.view, peer, pings_[peer] + 1, rounds,
                                     pointer<int64_t>(nanoseconds), prepared.stream),
             "low-latency ping kernel");
  pings_[peer] += static_cast<uint64_t>(rounds) + 1;
}

std::optional<Fault> LowLatency::fault() const {
  const FaultRecord& record = host_->fault;
  if (record.state == 0) return std::nullopt;
  std::atomic_thread_fence(std::memory_order_acquire);
  return Fault{record.rank,      record.peer,     phase_name(record.phase),
               record.operation, record.expected, record.seen};
}

}  // namespace moe_ep
