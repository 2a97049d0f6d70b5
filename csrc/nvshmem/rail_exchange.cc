#include "nvshmem/rail_exchange.h"

#include <stdexcept>
#include <string>

#include "kernels/stage.h"
#include "nvshmem/rail_kernels.h"
#include "runtime/error.h"

namespace moe_ep {
namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

cudaStream_t stream_of(const Launch& launch) { return pointer<CUstream_st>(launch.stream); }

void check_row(int64_t row_bytes, int64_t max_row_bytes) {
  if (row_bytes > 0 && row_bytes % kVectorBytes == 0 && row_bytes <= max_row_bytes) return;
  throw std::invalid_argument("a row of " + std::to_string(row_bytes) +
                              " bytes; it must be a multiple of 16, at most " +
                              std::to_string(max_row_bytes));
}

RowsArgs rows_args(const CommView& comm, const RailView& rail, const RailRows& rows) {
  check_row(rows.row_bytes, rail.shape.max_row_bytes);
  RowsArgs args{};
  args.comm = comm;
  args.rail = rail;
  args.status = pointer<const int32_t>(rows.status);
  args.expert_of_slot = pointer<const int32_t>(rows.expert_of_slot);
  args.x = pointer<const char>(rows.x);
  args.scales = pointer<const float>(rows.scales);
  args.probs = pointer<const float>(rows.probs);
  args.row_bytes = rows.row_bytes;
  args.num_scales = rows.num_scales;
  args.num_tokens = rows.num_tokens;
  args.first_token = rows.first_token;
  return args;
}

SumsArgs sums_args(const CommView& comm, const RailView& rail, const RailSums& sums) {
  SumsArgs args{};
  args.comm = comm;
  args.rail = rail;
  args.status = pointer<const int32_t>(sums.status);
  args.expert_of_slot = pointer<const int32_t>(sums.expert_of_slot);
  args.sums = pointer<const char>(sums.sums);
  args.values = pointer<const float>(sums.values);
  args.out = pointer<char>(sums.out);
  args.slot_values = pointer<float>(sums.slot_values);
  args.type = static_cast<DataType>(sums.type);
  const int64_t row_bytes = sums.hidden * element_bytes(args.type);
  check_row(row_bytes, rail.shape.max_row_bytes);
  args.row = row_shape(row_bytes);
  args.num_tokens = sums.num_tokens;
  args.first_token = sums.first_token;
  return args;
}

}  // namespace

RailExchange::RailExchange(const RailConfig& config) : config_(config) {
  if (config.num_hosts < 1 || config.num_hosts > kMaxHosts) {
    throw std::invalid_argument("num_hosts is " + std::to_string(config.num_hosts) +
                                "; it must be 1 to " + std::to_string(kMaxHosts));
  }
  check_cuda(cudaSetDevice(config.device), "cudaSetDevice");
  check_cuda(cudaMalloc(&control_, sizeof(RailControl)), "cudaMalloc");
  check_cuda(cudaMemset(control_, 0, sizeof(RailControl)), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

RailExchange::~RailExchange() {
  if (cudaSetDevice(config_.device) == cudaSuccess) cudaFree(control_);
  cudaGetLastError();
}

RailShape RailExchange::shape(int64_t max_tokens) const {
  RailShape shape{};
  shape.num_hosts = config_.num_hosts;
  shape.num_slots = config_.num_slots;
  shape.max_row_bytes = config_.max_row_bytes;
  shape.max_scales = config_.max_scales;
  shape.chunk_tokens = config_.chunk_tokens;
  shape.max_tokens = max_tokens;
  return shape;
}

RailView RailExchange::view() const {
  if (heap_ == nullptr) throw std::runtime_error("no block of the NVSHMEM heap is attached");
  check_cuda(cudaSetDevice(config_.device), "cudaSetDevice");
  RailView view{};
  view.host = config_.host;
  view.num_hosts = config_.num_hosts;
  view.local_rank = config_.local_rank;
  view.ranks_per_host = config_.ranks_per_host;
  view.num_local_experts = config_.num_local_experts;
  view.shape = shape(max_tokens_);
  view.layout = rail_layout(view.shape);
  view.control = control_;
  view.heap = heap_;
  return view;
}

int64_t RailExchange::block_bytes(int64_t max_tokens) const {
  return rail_layout(shape(max_tokens)).total;
}

void RailExchange::attach(uintptr_t heap, int64_t max_tokens) {
  heap_ = pointer<char>(heap);
  max_tokens_ = max_tokens;
  RailControl fresh{};
  check_cuda(cudaMemcpy(&fresh, control_, sizeof(fresh), cudaMemcpyDeviceToHost), "cudaMemcpy");
  fresh.epoch = 0;
  fresh.chunks_sent = fresh.chunks_staged = fresh.chunks_returned = fresh.chunks_summed = 0;
  check_cuda(cudaMemcpy(control_, &fresh, sizeof(fresh), cudaMemcpyHostToDevice), "cudaMemcpy");
}

uintptr_t RailExchange::verdict() const { return reinterpret_cast<uintptr_t>(&control_->verdict); }

uintptr_t RailExchange::sums(int chunk) const {
  const int64_t tokens = static_cast<int64_t>(config_.num_hosts) * config_.chunk_tokens;
  const int64_t offset = chunk % kInboxSlots * tokens * config_.max_row_bytes;
  return reinterpret_cast<uintptr_t>(heap_ + rail_layout(shape(max_tokens_)).sums_out + offset);
}

uintptr_t RailExchange::values(int chunk) const {
  const int64_t tokens = static_cast<int64_t>(config_.num_hosts) * config_.chunk_tokens;
  const int64_t offset = chunk % kInboxSlots * tokens * config_.num_slots * 4;
  return reinterpret_cast<uintptr_t>(heap_ + rail_layout(shape(max_tokens_)).values_out + offset);
}

void RailExchange::exchange_routing(const Communicator& comm, uintptr_t topk_idx, bool is_64_bit,
                                    int64_t num_tokens, int num_slots, uintptr_t expert_of_slot,
                                    uintptr_t host_topk, const Launch& launch) {
  if (num_slots > config_.num_slots) {
    throw std::invalid_argument("tokens with " + std::to_string(num_slots) + " slots; at most " +
                                std::to_string(config_.num_slots) + " are provided for");
  }
  RoutingArgs args{};
  args.comm = comm.view(launch);
  args.rail = view();
  args.topk_idx = pointer<const void>(topk_idx);
  args.topk_is_64_bit = is_64_bit;
  args.num_slots = num_slots;
  args.num_tokens = num_tokens;
  args.expert_of_slot = pointer<int32_t>(expert_of_slot);
  args.host_topk = pointer<int32_t>(host_topk);
  check_cuda(launch_exchange_routing(args, launch.num_sms, stream_of(launch)),
             "exchange_routing kernel");
}

void RailExchange::agree(const Communicator& comm, const PlanView& plan, bool report,
                         int64_t capacity, const Launch& launch) {
  AgreeArgs args{};
  args.comm = comm.view(launch);
  args.rail = view();
  args.plan = plan;
  args.capacity = capacity;
  args.report_to_host = report;
  check_cuda(launch_agree(args, stream_of(launch)), "agree kernel");
}

void RailExchange::fetch_chunks(const Communicator& comm, const PlanView& plan, int num_chunks,
                                uintptr_t cuts, uintptr_t chunk_headers, const Launch& launch) {
  ListsArgs args{};
  args.comm = comm.view(launch);
  args.plan = plan;
  args.num_chunks = num_chunks;
  args.part_tokens = static_cast<int64_t>(config_.num_hosts) * config_.chunk_tokens;
  args.cuts = pointer<int32_t>(cuts);
  args.chunk_headers = pointer<int32_t>(chunk_headers);
  check_cuda(launch_fetch_chunks(args, launch.num_sms, stream_of(launch)), "fetch_chunks kernel");
}

void RailExchange::quantize(uintptr_t x, int type, int64_t num_tokens, int hidden,
                            bool power_of_two, uintptr_t q, uintptr_t scales,
                            const Launch& launch) {
  if (num_tokens == 0) return;
  if (hidden % kFp8Block != 0 || x % kVectorBytes != 0) {
    throw std::invalid_argument("rows of " + std::to_string(hidden) +
                                " columns; FP8 needs a multiple of 128, aligned to 16 bytes");
  }
  QuantizeArgs args{};
  args.source.x = pointer<const char>(x);
  args.source.type = static_cast<DataType>(type);
  args.source.hidden = hidden;
  args.source.power_of_two_scales = power_of_two;
  args.num_tokens = num_tokens;
  args.rows = pointer<char>(q);
  args.scales = pointer<float>(scales);
  check_cuda(launch_quantize(args, launch.num_sms, stream_of(launch)), "quantize kernel");
}

void RailExchange::send_rows(const Communicator& comm, const RailRows& rows, const Launch& launch) {
  const RowsArgs args = rows_args(comm.view(launch), view(), rows);
  check_cuda(launch_send_rows(args, launch.num_sms, stream_of(launch)), "send_rows kernel");
}

void RailExchange::stage_rows(const Communicator& comm, const PlanView& plan, const RailRows& rows,
                              const Launch& launch) {
  RowsArgs args = rows_args(comm.view(launch), view(), rows);
  args.plan = plan;
  check_cuda(launch_stage_rows(args, launch.num_sms, stream_of(launch)), "stage_rows kernel");
}

void RailExchange::return_sums(const Communicator& comm, const PlanView& plan, const RailSums& sums,
                               const Launch& launch) {
  SumsArgs args = sums_args(comm.view(launch), view(), sums);
  args.plan = plan;
  check_cuda(launch_return_sums(args, launch.num_sms, stream_of(launch)), "return_sums kernel");
}

void RailExchange::add_sums(const Communicator& comm, const RailSums& sums, const Launch& launch) {
  const SumsArgs args = sums_args(comm.view(launch), view(), sums);
  check_cuda(launch_add_sums(args, launch.num_sms, stream_of(launch)), "add_sums kernel");
}

Border RailExchange::border() const {
  RailControl now{};
  check_cuda(cudaSetDevice(config_.device), "cudaSetDevice");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check_cuda(cudaMemcpy(&now, control_, sizeof(now), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return {now.border_rows, now.border_bytes, now.border_other_bytes};
}

}  // namespace moe_ep
