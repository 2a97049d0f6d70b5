#include "runtime/communicator.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <new>
#include <thread>

#include "kernels/combine.h"
#include "kernels/dispatch.h"
#include "kernels/notify.h"
#include "kernels/stage.h"
#include "runtime/error.h"

namespace moe_ep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kBusyWait = std::chrono::milliseconds(20);  // waking up would take longer
constexpr auto kStreamCheck = std::chrono::milliseconds(20);

const char* phase_name(Phase phase) {
  switch (phase) {
    case Phase::kCounts:
      return "dispatch.notify (counts)";
    case Phase::kLists:
      return "dispatch.notify (lists)";
    case Phase::kStageFree:
      return "dispatch (staging slot free)";
    case Phase::kStageReady:
      return "dispatch (rows staged)";
    case Phase::kSlotsFree:
      return "combine (slots free)";
    case Phase::kPartials:
      return "combine (partial sums)";
    case Phase::kGrid:
      return "its own blocks";
    case Phase::kRailRouting:
      return "dispatch.notify (expert ids from another host)";
    case Phase::kRailVerdict:
      return "dispatch.notify (verdict of another host)";
    case Phase::kRailRowsFree:
      return "dispatch (inbox on another host free)";
    case Phase::kRailRows:
      return "dispatch (rows from another host)";
    case Phase::kRailSumsFree:
      return "combine (inbox on another host free)";
    case Phase::kRailSums:
      return "combine (sums from another host)";
    case Phase::kNone:
      break;
  }
  return "no phase";
}

void check_limit(const char* what, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return;
  throw std::invalid_argument(std::string(what) + " is " + std::to_string(value) + "; it must be " +
                              std::to_string(low) + " to " + std::to_string(high));
}

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Row copies use 16-byte accesses.
void check_aligned(const char* what, uintptr_t address) {
  if (address % kVectorBytes == 0) return;
  throw std::invalid_argument(std::string(what) + " is not aligned to 16 bytes");
}

int64_t checked_row_bytes(int hidden, int type, int max_row_bytes) {
  const int64_t bytes = hidden * element_bytes(static_cast<DataType>(type));
  if (bytes % kVectorBytes != 0 || bytes > max_row_bytes) {
    throw std::invalid_argument("a row of " + std::to_string(bytes) +
                                " bytes; it must be a multiple of 16, at most " +
                                std::to_string(max_row_bytes));
  }
  return bytes;
}

cudaStream_t stream_of(const Launch& launch) { return pointer<CUstream_st>(launch.stream); }

}  // namespace

Communicator::Communicator(const CommunicatorConfig& config) : config_(config) {
  check_limit("num_ranks", config.num_ranks, 1, kMaxRanks);
  check_limit("num_experts (expert-tensor copies included)", config.num_experts, config.num_ranks,
              kMaxExperts);
  check_limit("slots of a token", config.num_slots, 1, kMaxSlots);
  check_cuda(cudaSetDevice(config.device), "cudaSetDevice");
  check_cuda(cudaMalloc(&control_, sizeof(Control)), "cudaMalloc");
  check_cuda(cudaMemset(control_, 0, sizeof(Control)), "cudaMemset");
  const int64_t words = notify_scratch_words(config.num_experts, config.num_ranks);
  check_cuda(cudaMalloc(&scratch_, words * sizeof(int32_t)), "cudaMalloc");
  check_cuda(prepare_notify(config.num_experts, config.num_ranks), "notify kernel");
  void* host = nullptr;
  check_cuda(cudaHostAlloc(&host, sizeof(HostState), cudaHostAllocMapped | cudaHostAllocPortable),
             "cudaHostAlloc");
  host_ = new (host) HostState{};
  check_cuda(cudaHostGetDevicePointer(reinterpret_cast<void**>(&host_mapped_), host, 0),
             "cudaHostGetDevicePointer");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Communicator::~Communicator() {
  // Peers may still use the memory of an object that was dropped without release_memory(), which
  // comes after a group barrier. It then stays until the process ends.
  if (config_.num_ranks > 1) static_cast<void>(memory_.release());
  memory_.reset();
  if (cudaSetDevice(config_.device) == cudaSuccess) {
    cudaFree(control_);
    cudaFree(scratch_);
    cudaFreeHost(host_);
  }
  cudaGetLastError();
}

SymmetricMemory& Communicator::allocate(int64_t max_tokens, MemoryKind kind) {
  SymmetricShape shape{};
  shape.num_ranks = config_.num_ranks;
  shape.num_experts = config_.num_experts;
  shape.num_slots = config_.num_slots;
  shape.max_row_bytes = config_.max_row_bytes;
  shape.max_scales = config_.max_scales;
  shape.exact_combine = config_.exact_combine;
  shape.max_tokens = max_tokens;
  if (config_.num_hosts > 0) {
    shape.max_tokens = static_cast<int64_t>(config_.num_hosts) * config_.chunk_tokens;
    shape.list_tokens = shape.max_tokens * ceil_div(max_tokens, config_.chunk_tokens);
  }
  max_tokens_ = max_tokens;
  memory_.reset();
  memory_ = std::make_unique<SymmetricMemory>(config_.device, config_.rank, shape, kind);
  // Nobody reads the new memory yet: its slots are free, whatever the old ones' last operation was.
  Control fresh{};
  check_cuda(cudaMemcpy(&fresh, control_, sizeof(fresh), cudaMemcpyDeviceToHost), "cudaMemcpy");
  fresh.stage_operation[0] = fresh.stage_operation[1] = fresh.combine_operation = 0;
  check_cuda(cudaMemcpy(control_, &fresh, sizeof(fresh), cudaMemcpyHostToDevice), "cudaMemcpy");
  return *memory_;
}

void Communicator::release_memory() { memory_.reset(); }

SymmetricMemory& Communicator::memory() {
  if (memory_ == nullptr) throw std::runtime_error("no symmetric memory is allocated");
  return *memory_;
}

PlanMemory Communicator::layout_of_plan(int64_t num_tokens, int num_slots, int64_t rank_rows,
                                        int64_t items) const {
  const int local = config_.num_experts / config_.num_ranks;
  return plan_memory(plan_header(config_.num_ranks, local).total, num_tokens, num_slots,
                     max_destinations(config_.num_slots, config_.num_ranks), rank_rows, items);
}

int64_t Communicator::plan_words(int64_t num_tokens, int num_slots, int64_t rank_rows,
                                 int64_t items) const {
  return layout_of_plan(num_tokens, num_slots, rank_rows, items).total;
}

PlanView Communicator::plan(uintptr_t memory, int64_t num_tokens, int num_slots, int64_t rank_rows,
                            int64_t items) const {
  const PlanMemory at = layout_of_plan(num_tokens, num_slots, rank_rows, items);
  int32_t* words = pointer<int32_t>(memory);
  PlanView plan{};
  plan.header = words;
  plan.row_of_slot = words + at.row_of_slot;
  plan.num_partials = words + at.num_partials;
  plan.partial_slots = words + at.partial_slots;
  plan.item_of_slot = words + at.item_of_slot;
  plan.num_tokens = num_tokens;
  plan.num_slots = num_slots;
  if (rank_rows + items == 0) return plan;
  plan.rank_rows = reinterpret_cast<RankRow*>(words + at.rank_rows);
  plan.items = reinterpret_cast<Item*>(words + at.items);
  return plan;
}

CommView Communicator::view(const Launch& launch) const {
  if (memory_ == nullptr) throw std::runtime_error("no symmetric memory is allocated");
  check_limit("num_sms", launch.num_sms, 1, 1 << 16);
  check_cuda(cudaSetDevice(config_.device), "cudaSetDevice");
  CommView view{};
  view.rank = config_.rank;
  view.num_ranks = config_.num_ranks;
  view.bad_input = launch.bad_input;
  view.timeout_ns = static_cast<uint64_t>(launch.timeout_s * 1e9);
  view.control = control_;
  view.host = host_mapped_;
  view.layout = memory_->layout();
  view.num_experts = config_.num_experts;
  view.max_slots = config_.num_slots;
  view.max_tokens = max_tokens_;
  view.first_rank = config_.host * config_.num_ranks;
  for (int i = 0; i < config_.num_ranks; ++i) view.peers[i] = memory_->peer(i);
  return view;
}

uint64_t Communicator::notify(const PlanView& plan, const DispatchTensors* staged,
                              uintptr_t topk_idx, bool is_64_bit, bool report, int64_t capacity,
                              const Launch& launch) {
  check_limit("slots of a token", plan.num_slots, 1, config_.num_slots);
  NotifyArgs args{};
  args.comm = view(launch);
  if (staged != nullptr && stages(plan, *staged)) {
    args.stages = 1;
    args.source = staged_source(*staged);
  }
  args.plan = plan;
  args.topk_idx = pointer<const void>(topk_idx);
  args.topk_is_64_bit = is_64_bit;
  args.row_alignment = config_.row_alignment;
  args.capacity = capacity;
  args.report_to_host = report;
  args.scratch = scratch_;
  if (report) host_->counts_ready = 0;
  check_cuda(launch_notify(args, launch.num_sms, stream_of(launch)), "notify kernel");
  return ++operations_;
}

uint64_t Communicator::notify_hosts(const PlanView& plan, uintptr_t topk_idx, int64_t own_tokens,
                                    uintptr_t verdict, bool report, int64_t capacity,
                                    const Launch& launch) {
  NotifyArgs args{};
  args.comm = view(launch);
  args.plan = plan;
  args.topk_idx = pointer<const void>(topk_idx);
  args.row_alignment = config_.row_alignment;
  args.capacity = capacity;
  args.scratch = scratch_;
  args.blocks_per_expert = config_.num_hosts;
  args.verdict = pointer<NotifyVerdict>(verdict);
  args.own_tokens = own_tokens;
  args.part_tokens = static_cast<int64_t>(config_.num_hosts) * config_.chunk_tokens;
  if (report) host_->counts_ready = 0;
  check_cuda(launch_notify(args, launch.num_sms, stream_of(launch)), "notify kernel");
  return ++operations_;
}

void Communicator::fetch_lists(const PlanView& plan, const Launch& launch) {
  const FetchListsArgs args{view(launch), plan};
  check_cuda(launch_fetch_lists(args, launch.num_sms, stream_of(launch)), "fetch_lists kernel");
}

bool Communicator::stages(const PlanView& plan, const DispatchTensors& tensors) const {
  check_aligned("x", tensors.x);
  check_aligned("probs", tensors.probs);
  if (plan.num_tokens > memory_->shape().max_tokens) return false;  // notify will ask for room
  return config_.num_ranks > 1 || tensors.fp8 != 0;                 // a rank alone reads x itself
}

StagedSource Communicator::staged_source(const DispatchTensors& tensors) const {
  const bool to_fp8 = tensors.fp8 != 0;
  if (to_fp8 &&
      (tensors.hidden % kFp8Block != 0 || tensors.hidden / kFp8Block > config_.max_scales)) {
    throw std::invalid_argument("hidden is " + std::to_string(tensors.hidden) +
                                "; FP8 needs a multiple of 128, at most " +
                                std::to_string(config_.max_scales * kFp8Block));
  }
  return {pointer<const char>(tensors.x),
          pointer<const float>(tensors.probs),
          checked_row_bytes(tensors.hidden, tensors.type, config_.max_row_bytes),
          static_cast<DataType>(tensors.type),
          tensors.hidden,
          to_fp8,
          tensors.fp8 == 2};
}

void Communicator::stage(const PlanView& plan, const DispatchTensors& tensors,
                         const Launch& launch) {
  const CommView comm = view(launch);
  if (!stages(plan, tensors)) return;
  const StageArgs args{comm, plan, staged_source(tensors)};
  check_cuda(launch_stage(args, launch.num_sms, stream_of(launch)), "stage kernel");
}

uint64_t Communicator::dispatch(const PlanView& plan, const DispatchTensors& tensors,
                                uintptr_t rows, uintptr_t row_probs, uintptr_t row_scales,
                                const Launch& launch) {
  const int64_t row_bytes = checked_row_bytes(tensors.hidden, tensors.type, config_.max_row_bytes);
  DispatchArgs args{};
  args.comm = view(launch);
  args.plan = plan;
  args.x = pointer<const char>(tensors.x);
  args.probs = pointer<const float>(tensors.probs);
  args.rows = pointer<char>(rows);
  args.row_probs = pointer<float>(row_probs);
  args.row_scales = pointer<float>(row_scales);
  args.type = static_cast<DataType>(tensors.type);
  args.hidden = tensors.hidden;
  args.own_staged = config_.num_hosts > 0;
  if (tensors.fp8 == 0) {
    args.shape = row_shape(row_bytes);
    check_cuda(launch_dispatch(args, launch.num_sms, stream_of(launch)), "dispatch kernel");
  } else {
    args.shape = row_shape(args.row_scales == nullptr ? tensors.hidden * 2 : tensors.hidden);
    check_cuda(launch_dispatch_fp8(args, launch.num_sms, stream_of(launch)), "dispatch_fp8 kernel");
  }
  return ++operations_;
}

uint64_t Communicator::combine(const PlanView& plan, const CombineTensors& tensors,
                               const Launch& launch) {
  check_aligned("rows", tensors.rows);
  CombineArgs args{};
  args.comm = view(launch);
  args.plan = plan;
  args.shape = row_shape(checked_row_bytes(tensors.hidden, tensors.type, config_.max_row_bytes));
  args.type = static_cast<DataType>(tensors.type);
  args.exact = config_.exact_combine;
  args.rows = pointer<const char>(tensors.rows);
  args.weights = pointer<const float>(tensors.weights);
  args.values = pointer<const float>(tensors.values);
  args.out = pointer<char>(tensors.out);
  args.slot_values = pointer<float>(tensors.slot_values);
  check_cuda(launch_combine(args, launch.num_sms, stream_of(launch)), "combine kernel");
  return ++operations_;
}

Counts Communicator::read_counts() const {
  Counts counts;
  counts.status = static_cast<int>(host_->status);
  counts.culprit = host_->culprit;
  counts.worst_rows = host_->worst_rows;
  counts.max_tokens = host_->max_tokens;
  counts.capacity = host_->capacity;
  counts.num_rows = host_->num_rows;
  counts.num_rank_rows = host_->num_rank_rows;
  counts.num_items = host_->num_items;
  const int local = config_.num_experts / config_.num_ranks;
  counts.expert_rows.assign(host_->expert_rows, host_->expert_rows + local);
  counts.expert_count.assign(host_->expert_count, host_->expert_count + local);
  return counts;
}

std::optional<Counts> Communicator::wait_counts(const Launch& launch) {
  // The kernel ends by itself when a peer stays away, so this loop ends too: it only has to look
  // at the stream in case the kernel could not run at all.
  const auto start = Clock::now();
  auto next_check = start + kStreamCheck;
  while (host_->counts_ready == 0) {
    if (host_->fault.state != 0) return std::nullopt;
    const auto now = Clock::now();
    if (now > next_check) {
      next_check = now + kStreamCheck;
      const cudaError_t error = cudaStreamQuery(stream_of(launch));
      if (error != cudaSuccess && error != cudaErrorNotReady) check_cuda(error, "notify kernel");
      if (error == cudaSuccess && host_->counts_ready == 0 && host_->fault.state == 0) {
        throw std::runtime_error("the notify kernel ended without an answer");
      }
    }
    if (now - start > kBusyWait) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  // A failed one has used up the number of the dispatch that it was for, except between hosts.
  if (host_->status != NotifyStatus::kOk && config_.num_hosts == 0) ++operations_;
  return read_counts();
}

std::optional<Fault> Communicator::fault() const {
  const FaultRecord& record = host_->fault;
  if (record.state == 0) return std::nullopt;
  std::atomic_thread_fence(std::memory_order_acquire);
  return Fault{record.rank,      record.peer,     phase_name(record.phase),
               record.operation, record.expected, record.seen};
}

std::optional<std::pair<int64_t, int>> Communicator::last_wait() const {
  const uint64_t word = host_->slowest_peer;
  if (word == 0) return std::nullopt;
  return std::pair(wait_nanoseconds(word), wait_peer(word));
}

int Communicator::take_bad_peer() {
  const int peer = static_cast<int>(host_->bad_peer) - 1;
  if (peer >= 0) host_->bad_peer = 0;
  return peer;
}

Counts Communicator::sticky() const {
  Counts counts;
  counts.status = static_cast<int>(host_->sticky_status);
  if (counts.status == 0) return counts;
  std::atomic_thread_fence(std::memory_order_acquire);
  counts.culprit = host_->culprit;
  counts.worst_rows = host_->worst_rows;
  counts.max_tokens = host_->max_tokens;
  counts.capacity = host_->capacity;
  return counts;
}

}  // namespace moe_ep
