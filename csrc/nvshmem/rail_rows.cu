// send_rows and stage_rows: token rows to other hosts, once for each, and from the inbox to where
// the ranks of this host pull them from. A dispatch on one host has `stage` in this place.
#include "device/staging.cuh"
#include "nvshmem/rail.cuh"
#include "nvshmem/rail_kernels.h"

namespace moe_ep {
namespace {

// Copies whole rows, a warp each; `bytes` is a multiple of 16.
__device__ __forceinline__ void copy_row(char* target, const char* source, int64_t bytes,
                                         int lane) {
  constexpr int64_t kStep = kWarp * kVectorsPerLane * kVectorBytes;
#pragma unroll 1
  for (int64_t at = 0; at < bytes; at += kStep) {
    const int vectors = static_cast<int>(min64(bytes - at, kStep) / kVectorBytes);
    Piece piece;
    load_piece(piece, source + at, vectors, lane);
    store_piece(piece, target + at, vectors, lane);
  }
}

__device__ __forceinline__ void copy_floats(float* target, const float* source, int count,
                                            int lane) {
  for (int i = lane; i < count; i += kWarp) target[i] = source[i];
}

// A token's row and what goes with it.
struct TokenRow {
  char* row;
  float* scales;
  float* probs;
};

__device__ __forceinline__ TokenRow message_at(const RailMessage& message, char* begin) {
  return {begin, reinterpret_cast<float*>(begin + message.scales),
          reinterpret_cast<float*>(begin + message.probs)};
}

__device__ __forceinline__ TokenRow own_row(const RowsArgs& args, int64_t token) {
  const int slots = args.rail.shape.num_slots;
  return {const_cast<char*>(args.x) + token * args.row_bytes,
          const_cast<float*>(args.scales) + token * args.num_scales,
          const_cast<float*>(args.probs) + token * slots};
}

__device__ __forceinline__ void copy_token(const RowsArgs& args, const TokenRow& to,
                                           const TokenRow& from, int lane) {
  copy_row(to.row, from.row, args.row_bytes, lane);
  if (args.scales != nullptr) copy_floats(to.scales, from.scales, args.num_scales, lane);
  if (args.probs != nullptr) copy_floats(to.probs, from.probs, args.rail.shape.num_slots, lane);
}

__device__ __forceinline__ RailMessage message_of(const RowsArgs& args) {
  return rail_message(args.row_bytes, args.num_scales,
                      args.probs == nullptr ? 0 : args.rail.shape.num_slots);
}

__device__ __forceinline__ bool has_work(const RowsArgs& args) {
  return !is_aborted(args.comm) && *args.status == static_cast<int32_t>(NotifyStatus::kOk);
}

// Puts every token of the chunk to the other hosts that want it.
__device__ void put_tokens(const RowsArgs& args, int64_t slot) {
  const RailView& rail = args.rail;
  const int lane = threadIdx.x % kWarp, slots = rail.shape.num_slots;
  const int64_t chunk = rail.shape.chunk_tokens;
  const int64_t count = min64(args.num_tokens - args.first_token, chunk);
  const RailMessage message = message_of(args);
  uint64_t rows = 0;
  for (int64_t t = grid_warp(); t < count; t += grid_warps()) {
    const int64_t token = args.first_token + t;
    const int expert = lane < slots ? args.expert_of_slot[token * slots + lane] : -1;
    const int host = rail.host_of_expert(expert);
    if (__ballot_sync(0xffffffffu, host >= 0 && host != rail.host) == 0) continue;
    char* staged =
        rail.heap + rail.layout.rows_out + (slot * chunk + t) * rail.layout.message_bytes;
    copy_token(args, message_at(message, staged), own_row(args, token), lane);
    __threadfence_system();  // what reads it next may be a network card
    __syncwarp();
    for (int step = 0; step < rail.num_hosts - 1; ++step) {
      const int peer = staggered_peer(rail.host, step, rail.num_hosts);
      if (__ballot_sync(0xffffffffu, host == peer) == 0) continue;
      nvshmemx_putmem_nbi_warp(rail.row_in(slot, rail.host, t), staged, message.bytes,
                               rail.rank_on(peer));
      ++rows;
    }
  }
  __syncwarp();
  if (lane != 0 || rows == 0) return;
  nvshmem_quiet();  // all that this warp has put has arrived
  count_border(&rail.control->border_rows, rows);
  count_border(&rail.control->border_bytes, rows * message.bytes);
}

__global__ void __launch_bounds__(kRailThreads, 1)
    send_rows_kernel(const __grid_constant__ RowsArgs args) {
  const CommView& comm = args.comm;
  const RailView& rail = args.rail;
  RailControl* control = rail.control;
  if (!has_work(args)) return;
  const uint64_t chunks = control->chunks_sent;
  if (!wait_chunk(comm, rail, RailSignal::kRowsFree, chunks_to_be_read(chunks),
                  Phase::kRailRowsFree, false)) {
    return;
  }
  put_tokens(args, static_cast<int64_t>(chunks % kInboxSlots));
  if (!arrive_last(&control->arrived_send)) return;
  if (threadIdx.x < kWarp) {
    signal_rail(rail, RailSignal::kRowsReady, signal_word(comm, chunks + 1), threadIdx.x);
  }
  if (threadIdx.x == 0) control->chunks_sent = chunks + 1;
}

__global__ void __launch_bounds__(kRailThreads, 1)
    stage_rows_kernel(const __grid_constant__ RowsArgs args) {
  const CommView& comm = args.comm;
  const RailView& rail = args.rail;
  RailControl* control = rail.control;
  if (!has_work(args)) return;
  const StagingSlot slot = current_slot(comm);
  const uint64_t chunks = control->chunks_staged;
  if (!wait_all_peers(comm, Signal::kStageDone, slot.last_used_by, Phase::kStageFree)) return;
  if (!wait_chunk(comm, rail, RailSignal::kRowsReady, chunks + 1, Phase::kRailRows, true)) return;
  const int lane = threadIdx.x % kWarp, slots = rail.shape.num_slots;
  const int64_t chunk = rail.shape.chunk_tokens;
  const StagedRows stage = staged_rows(comm, slot, comm.rank);
  const RailMessage message = message_of(args);
  for (int64_t v = grid_warp(); v < args.plan.num_tokens; v += grid_warps()) {
    if (args.plan.num_partials[v] == 0) continue;
    const int host = static_cast<int>(v / chunk);
    const int64_t t = v % chunk;
    const TokenRow to{stage.rows + v * args.row_bytes, stage.scales + v * args.num_scales,
                      stage.probs + v * slots};
    const TokenRow from =
        host == rail.host
            ? own_row(args, args.first_token + t)
            : message_at(message, rail.row_in(static_cast<int64_t>(chunks % kInboxSlots), host, t));
    copy_token(args, to, from, lane);
  }
  if (!arrive_last(&control->arrived_stage)) return;
  if (threadIdx.x < kWarp) {
    signal_peers(comm, Signal::kStageReady, relayed_word(comm, slot.operation), threadIdx.x);
    signal_rail(rail, RailSignal::kRowsFree, chunks + 1, threadIdx.x);
  }
  if (threadIdx.x == 0) control->chunks_staged = chunks + 1;
}

}  // namespace

cudaError_t launch_send_rows(const RowsArgs& args, int num_blocks, cudaStream_t stream) {
  send_rows_kernel<<<num_blocks, kRailThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_stage_rows(const RowsArgs& args, int num_blocks, cudaStream_t stream) {
  stage_rows_kernel<<<num_blocks, kRailThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moe_ep
