// exchange_routing and agree: what the notify kernel of a host gets to count, and what all hosts
// think of the result.
#include "nvshmem/rail.cuh"
#include "nvshmem/rail_kernels.h"

namespace moe_ep {
namespace {

constexpr int kUnused = -1;
constexpr int kBad = -2;

__device__ __forceinline__ int load_expert(const RoutingArgs& args, int64_t token, int slot) {
  if (slot >= args.num_slots) return kUnused;
  const int64_t at = token * args.num_slots + slot;
  const int64_t expert = args.topk_is_64_bit ? static_cast<const int64_t*>(args.topk_idx)[at]
                                             : static_cast<const int32_t*>(args.topk_idx)[at];
  const RailView& rail = args.rail;
  const int64_t experts =
      static_cast<int64_t>(rail.num_hosts) * rail.ranks_per_host * rail.num_local_experts;
  return expert < -1 || expert >= experts ? kBad : static_cast<int>(expert);
}

// This rank's ids to its own memory and, unless there are more than there is room for, to its rail.
__device__ void put_routing(const RoutingArgs& args, bool fits) {
  const RailView& rail = args.rail;
  const int slots = rail.shape.num_slots;
  int32_t* out = reinterpret_cast<int32_t*>(rail.heap + rail.layout.routing_out);
  const int64_t per_block = ceil_div(args.num_tokens, gridDim.x);
  const int64_t begin = min64(blockIdx.x * per_block, args.num_tokens) * slots;
  const int64_t end = min64((blockIdx.x + 1) * per_block, args.num_tokens) * slots;
  for (int64_t i = begin + threadIdx.x; i < end; i += kRailThreads) {
    const int expert = load_expert(args, i / slots, static_cast<int>(i % slots));
    args.expert_of_slot[i] = expert;
    if (fits) out[i] = expert;
  }
  if (!fits || begin == end) return;  // the same in all threads
  __threadfence_system();
  __syncthreads();
  const int64_t bytes = (end - begin) * static_cast<int64_t>(sizeof(int32_t));
  const int64_t at = rail.host * rail.shape.max_tokens * slots + begin;
  int32_t* in = reinterpret_cast<int32_t*>(rail.heap + rail.layout.routing_in) + at;
  for (int step = 0; step < rail.num_hosts - 1; ++step) {
    const int peer = staggered_peer(rail.host, step, rail.num_hosts);
    nvshmemx_putmem_nbi_block(in, out + begin, bytes, rail.rank_on(peer));
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  nvshmem_quiet();
  count_border(&rail.control->border_other_bytes, bytes * (rail.num_hosts - 1));
}

// Tokens of every host's rank of the rail; none of one that has too many. False: a fault.
__device__ bool receive_tokens(const RoutingArgs& args, uint64_t epoch, int64_t* tokens) {
  const RailView& rail = args.rail;
  int passed = 1;
  const int host = threadIdx.x;
  if (host < rail.num_hosts) {
    uint64_t word = epoch << 32 | static_cast<uint64_t>(args.num_tokens);
    if (host != rail.host) {
      passed = wait_rail(args.comm, rail, RailSignal::kRouting, host, 32, epoch,
                         Phase::kRailRouting, word);
    }
    const int64_t count = static_cast<uint32_t>(word);
    tokens[host] = count <= rail.shape.max_tokens ? count : 0;
  }
  return __syncthreads_and(passed) != 0;
}

// The ids as this host counts them. Bad ids are counted by the host of their rank only.
__device__ void write_host_topk(const RoutingArgs& args, const int64_t* tokens) {
  const RailView& rail = args.rail;
  const int slots = rail.shape.num_slots, hosts = rail.num_hosts;
  const int64_t chunk = rail.shape.chunk_tokens;
  const int64_t total = ceil_div(rail.shape.max_tokens, chunk) * hosts * chunk * slots;
  const int first = rail.host * rail.ranks_per_host * rail.num_local_experts;
  const int past = first + rail.ranks_per_host * rail.num_local_experts;
  // Peers have written it while this kernel ran.
  const volatile int32_t* in =
      reinterpret_cast<const volatile int32_t*>(rail.heap + rail.layout.routing_in);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kRailThreads + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * kRailThreads) {
    const int64_t v = i / slots;
    const int slot = static_cast<int>(i % slots), host = static_cast<int>(v / chunk % hosts);
    const int64_t token = v / (chunk * hosts) * chunk + v % chunk;
    int expert = kUnused;
    if (token < tokens[host]) {
      expert = host == rail.host ? load_expert(args, token, slot)
                                 : in[(host * rail.shape.max_tokens + token) * slots + slot];
    }
    int mine = kUnused;
    if (expert >= first && expert < past) mine = (expert - first) * hosts + host;
    if (expert == kBad && host == rail.host) mine = kBad;
    args.host_topk[i] = mine;
  }
}

__global__ void __launch_bounds__(kRailThreads, 1)
    exchange_routing_kernel(const __grid_constant__ RoutingArgs args) {
  __shared__ int64_t tokens[kMaxHosts];
  const RailView& rail = args.rail;
  RailControl* control = rail.control;
  if (is_aborted(args.comm)) return;
  const uint64_t epoch = control->epoch + 1;
  const bool fits = args.num_tokens <= rail.shape.max_tokens;
  put_routing(args, fits);
  if (arrive_last(&control->arrived_routing) && threadIdx.x < 32) {
    const uint64_t word = epoch << 32 | static_cast<uint64_t>(args.num_tokens);
    signal_rail(rail, RailSignal::kRouting, word, threadIdx.x);
  }
  if (!receive_tokens(args, epoch, tokens)) return;
  write_host_topk(args, tokens);
  if (arrive_last(&control->arrived_routing_end) && threadIdx.x == 0) control->epoch = epoch;
}

// -- agree ----------------------------------------------------------------------------------------

constexpr int kVerdictWords = 3;

// Of word 0 to 2: kStatus, kWorstRows, kMaxTokens.
__device__ __forceinline__ RailSignal verdict_signal(int word) {
  return static_cast<RailSignal>(static_cast<int>(RailSignal::kStatus) + word);
}

// words[host][3], this host's own included. False: a fault.
__device__ bool exchange_verdicts(const AgreeArgs& args, uint64_t epoch,
                                  uint32_t (*words)[kVerdictWords]) {
  const RailView& rail = args.rail;
  if (threadIdx.x == 0) {
    const NotifyVerdict mine = rail.control->verdict;
    const uint32_t culprit = rail.host * rail.ranks_per_host + mine.culprit;
    words[rail.host][0] = static_cast<uint32_t>(mine.status) | culprit << 8;
    words[rail.host][1] = mine.worst_rows;
    words[rail.host][2] = mine.max_tokens;
  }
  __syncthreads();
  int passed = 1;
  const int host = threadIdx.x / kVerdictWords, i = threadIdx.x % kVerdictWords;
  if (threadIdx.x < kVerdictWords * 32) {
    signal_rail(rail, verdict_signal(threadIdx.x / 32),
                epoch << 32 | words[rail.host][threadIdx.x / 32], threadIdx.x % 32);
  }
  if (host < rail.num_hosts && host != rail.host) {
    uint64_t word = 0;
    passed =
        wait_rail(args.comm, rail, verdict_signal(i), host, 32, epoch, Phase::kRailVerdict, word);
    words[host][i] = static_cast<uint32_t>(word);
  }
  return __syncthreads_and(passed) != 0;
}

// The same on all ranks of all hosts.
__device__ NotifyVerdict decide(const AgreeArgs& args, const uint32_t (*words)[kVerdictWords]) {
  NotifyVerdict verdict{};
  int bad = -1, fullest = 0;
  for (int h = args.rail.num_hosts - 1; h >= 0; --h) {
    const int culprit = static_cast<int>(words[h][0] >> 8);
    if ((words[h][0] & 0xff) == static_cast<uint32_t>(NotifyStatus::kBadInput)) bad = culprit;
    const int rows = static_cast<int>(words[h][1]), tokens = static_cast<int>(words[h][2]);
    if (rows >= verdict.worst_rows) verdict.worst_rows = rows, fullest = culprit;
    verdict.max_tokens = max(verdict.max_tokens, tokens);
  }
  const bool overflow = args.capacity > 0 && verdict.worst_rows > args.capacity;
  verdict.culprit = bad >= 0 ? bad : fullest;
  verdict.status = bad >= 0                                          ? NotifyStatus::kBadInput
                   : verdict.max_tokens > args.rail.shape.max_tokens ? NotifyStatus::kNeedsRoom
                   : overflow                                        ? NotifyStatus::kOverflow
                                                                     : NotifyStatus::kOk;
  return verdict;
}

__device__ void empty_plan(const AgreeArgs& args, NotifyStatus status) {
  const CommView& comm = args.comm;
  const PlanView& plan = args.plan;
  const PlanHeader at = plan_header(comm.num_ranks, comm.num_experts / comm.num_ranks);
  for (int i = threadIdx.x; i < at.total; i += kRailThreads) {
    plan.header[i] = i == at.status ? static_cast<int32_t>(status) : 0;
  }
  for (int64_t i = threadIdx.x; i < plan.num_tokens * plan.num_slots; i += kRailThreads) {
    plan.row_of_slot[i] = -1;
  }
  for (int64_t i = threadIdx.x; i < plan.num_tokens; i += kRailThreads) plan.num_partials[i] = 0;
  __syncthreads();
}

__device__ void report(const AgreeArgs& args, const NotifyVerdict& verdict) {
  const CommView& comm = args.comm;
  HostState* host = comm.host;
  const int blocks = comm.num_experts / comm.num_ranks;
  const PlanHeader at = plan_header(comm.num_ranks, blocks);
  const int32_t* header = args.plan.header;
  const bool good = verdict.status == NotifyStatus::kOk;
  if (!args.report_to_host && (good || host->sticky_status != 0)) return;
  if (args.report_to_host) {
    for (int i = threadIdx.x; i < blocks; i += kRailThreads) {
      host->expert_rows[i] = header[at.expert_begin + i + 1] - header[at.expert_begin + i];
      host->expert_count[i] = header[at.expert_count + i];
    }
    __threadfence_system();
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  host->capacity = args.capacity;
  host->culprit = verdict.culprit;
  host->worst_rows = verdict.worst_rows;
  host->max_tokens = verdict.max_tokens;
  if (args.report_to_host) {
    host->status = verdict.status;
    host->num_rows = header[at.num_rows];
    host->num_rank_rows = header[at.num_rank_rows];
    host->num_items = header[at.num_items];
  }
  __threadfence_system();
  if (args.report_to_host) {
    host->counts_ready = 1;
  } else {
    host->sticky_status = static_cast<uint32_t>(verdict.status);
  }
}

__global__ void __launch_bounds__(kRailThreads, 1)
    agree_kernel(const __grid_constant__ AgreeArgs args) {
  __shared__ uint32_t words[kMaxHosts][kVerdictWords];
  if (is_aborted(args.comm)) return;
  if (!exchange_verdicts(args, args.rail.control->epoch, words)) return;
  const NotifyVerdict verdict = decide(args, words);
  if (verdict.status != NotifyStatus::kOk) empty_plan(args, verdict.status);
  report(args, verdict);
}

}  // namespace

cudaError_t launch_exchange_routing(const RoutingArgs& args, int num_blocks, cudaStream_t stream) {
  exchange_routing_kernel<<<num_blocks, kRailThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t launch_agree(const AgreeArgs& args, cudaStream_t stream) {
  agree_kernel<<<1, kRailThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace moe_ep
