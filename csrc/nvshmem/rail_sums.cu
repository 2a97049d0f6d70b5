// return_sums and add_sums: what the combine of a host has summed, back to the tokens' own ranks,
// and the sum over hosts there, in order of hosts.
#include "device/rows.cuh"
#include "kernels/by_type.cuh"
#include "nvshmem/rail.cuh"
#include "nvshmem/rail_kernels.h"

namespace moe_ep {
namespace {

__device__ __forceinline__ bool has_work(const SumsArgs& args) {
  return !is_aborted(args.comm) && *args.status == static_cast<int32_t>(NotifyStatus::kOk);
}

// This host's sums to the ranks of the rail; those for this rank itself to the same place here.
__device__ void put_sums(const SumsArgs& args, int64_t slot) {
  const RailView& rail = args.rail;
  const int lane = threadIdx.x % kWarp;
  const int64_t chunk = rail.shape.chunk_tokens, row_bytes = args.row.row_bytes;
  uint64_t rows = 0;
  for (int64_t i = grid_warp(); i < args.plan.num_tokens; i += grid_warps()) {
    const int host = staggered_peer(rail.host, static_cast<int>(i / chunk), rail.num_hosts);
    const int64_t t = i % chunk, v = host * chunk + t;
    if (args.plan.num_partials[v] == 0) continue;
    const char* sum = args.sums + v * row_bytes;
    char* target = rail.sum_in(slot, rail.host, t);
    if (host != rail.host) {
      nvshmemx_putmem_nbi_warp(target, sum, row_bytes, rail.rank_on(host));
      ++rows;
      continue;
    }
    for (int p = 0; p < args.row.pieces; ++p) {
      Piece piece;
      load_piece(piece, sum + args.row.offset_of(p), args.row.vectors_of(p), lane);
      store_piece(piece, target + args.row.offset_of(p), args.row.vectors_of(p), lane);
    }
  }
  __syncwarp();
  if (lane != 0 || rows == 0) return;
  nvshmem_quiet();
  count_border(&rail.control->border_rows, rows);
  count_border(&rail.control->border_bytes, rows * row_bytes);
}

// The carried values of the whole chunk, in one piece for each host.
__device__ void put_values(const SumsArgs& args, int64_t slot) {
  if (args.values == nullptr) return;
  const RailView& rail = args.rail;
  const int lane = threadIdx.x % kWarp;
  const int64_t count = rail.shape.chunk_tokens * rail.shape.num_slots;
  for (int64_t step = grid_warp(); step < rail.num_hosts; step += grid_warps()) {
    const int host = staggered_peer(rail.host, static_cast<int>(step), rail.num_hosts);
    const float* values = args.values + host * count;
    float* target = rail.values_in(slot, rail.host, 0);
    if (host == rail.host) {
      for (int64_t i = lane; i < count; i += kWarp) target[i] = values[i];
      continue;
    }
    nvshmemx_putmem_nbi_warp(target, values, count * 4, rail.rank_on(host));
    __syncwarp();
    if (lane == 0) {
      nvshmem_quiet();
      count_border(&rail.control->border_other_bytes, count * 4);
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kRailThreads, 1)
    return_sums_kernel(const __grid_constant__ SumsArgs args) {
  const CommView& comm = args.comm;
  const RailView& rail = args.rail;
  RailControl* control = rail.control;
  if (!has_work(args)) return;
  const uint64_t chunks = control->chunks_returned;
  if (!wait_chunk(comm, rail, RailSignal::kSumsFree, chunks_to_be_read(chunks),
                  Phase::kRailSumsFree, false)) {
    return;
  }
  put_sums(args, static_cast<int64_t>(chunks % kInboxSlots));
  put_values(args, static_cast<int64_t>(chunks % kInboxSlots));
  if (!arrive_last(&control->arrived_return)) return;
  if (threadIdx.x < kWarp) {
    signal_rail(rail, RailSignal::kSumsReady, relayed_word(comm, chunks + 1), threadIdx.x);
  }
  if (threadIdx.x == 0) control->chunks_returned = chunks + 1;
}

// The hosts that have summed something for a token: lane i holds the i-th, in ascending order.
struct TokenHosts {
  int32_t host;   // this lane's
  int32_t count;  // the same in all lanes
};

__device__ __forceinline__ TokenHosts hosts_of_token(const SumsArgs& args, int expert) {
  const int lane = threadIdx.x % kWarp, mine = args.rail.host_of_expert(expert);
  TokenHosts hosts{0, 0};
  for (int h = 0; h < args.rail.num_hosts; ++h) {
    if (__ballot_sync(0xffffffffu, mine == h) == 0) continue;
    if (lane == hosts.count) hosts.host = h;
    ++hosts.count;
  }
  return hosts;
}

template <typename T>
__device__ void sum_hosts(const SumsArgs& args, int64_t slot, bool valid) {
  const RailView& rail = args.rail;
  const int lane = threadIdx.x % kWarp, slots = rail.shape.num_slots;
  const int64_t chunk = rail.shape.chunk_tokens;
  const int64_t count = min64(args.num_tokens - args.first_token, chunk) * args.row.pieces;
  for (int64_t i = grid_warp(); i < count; i += grid_warps()) {
    const int64_t t = i / args.row.pieces, token = args.first_token + t;
    const int piece = static_cast<int>(i % args.row.pieces);
    const int expert = lane < slots && valid ? args.expert_of_slot[token * slots + lane] : -1;
    const TokenHosts hosts = hosts_of_token(args, expert);
    const int64_t offset = args.row.offset_of(piece);
    const RowSet rows{rail.sum_in(slot, 0, t) + offset, chunk * rail.shape.max_row_bytes,
                      hosts.host, 1.0f, hosts.count};
    char* target = args.out + token * args.row.row_bytes + offset;
    sum_rows<T, false>(rows, target, args.row.vectors_of(piece), lane);
    if (args.slot_values == nullptr || piece != 0 || lane >= slots) continue;
    float value = 0.0f;
    if (expert >= 0) value = rail.values_in(slot, rail.host_of_expert(expert), t)[lane];
    args.slot_values[token * slots + lane] = value;
  }
}

template <typename T>
__global__ void __launch_bounds__(kRailThreads, 1)
    add_sums_kernel(const __grid_constant__ SumsArgs args) {
  const CommView& comm = args.comm;
  const RailView& rail = args.rail;
  RailControl* control = rail.control;
  if (is_aborted(comm)) return;
  if (!has_work(args)) {
    sum_hosts<T>(args, 0, false);  // zeros
    return;
  }
  const uint64_t chunks = control->chunks_summed;
  if (!wait_chunk(comm, rail, RailSignal::kSumsReady, chunks + 1, Phase::kRailSums, true)) return;
  sum_hosts<T>(args, static_cast<int64_t>(chunks % kInboxSlots), true);
  if (!arrive_last(&control->arrived_sum)) return;
  if (threadIdx.x < kWarp) {
    signal_rail(rail, RailSignal::kSumsFree, chunks + 1, threadIdx.x);
  }
  if (threadIdx.x == 0) control->chunks_summed = chunks + 1;
}

}  // namespace

cudaError_t launch_return_sums(const SumsArgs& args, int num_blocks, cudaStream_t stream) {
  return_sums_kernel<<<num_blocks, kRailThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_add_sums(const SumsArgs& args, int num_blocks, cudaStream_t stream) {
  return launch_by_type(args.type, [&](auto zero) {
    add_sums_kernel<decltype(zero)><<<num_blocks, kRailThreads, 0, stream>>>(args);
  });
}

}  // namespace moe_ep
