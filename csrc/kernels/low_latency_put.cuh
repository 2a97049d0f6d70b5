// What a dispatch and a combine put to other hosts, and where what came from there is found.
// Compiled for a Link with a border only.
#pragma once

#include "kernels/low_latency_routing.cuh"
#include "shared/peer_order.h"

namespace moe_ep {

// -- what a dispatch puts -------------------------------------------------------------------------

// The host of a (token, k) pair, -1: none.
__device__ __forceinline__ int host_of_pair(const LowLatencyDispatchArgs& args, int64_t pair) {
  const LowLatencyShape& shape = args.view.shape;
  const int expert = load_expert(args.topk_idx, args.topk_is_64_bit != 0, pair);
  if (expert < 0 || expert >= shape.num_experts) return -1;
  return args.view.hosts.host_of(expert / (shape.num_experts / shape.num_ranks));
}

// Tells the ranks of other hosts how many messages all blocks put for them: rows, and routes of
// each block with tokens. All threads of the block that counted all tokens call it, after a
// barrier.
template <typename Link>
__device__ void signal_puts(const LowLatencyDispatchArgs& args, Routing& routing,
                            uint64_t operation) {
  const LowLatencyView& view = args.view;
  const LowLatencyHosts& hosts = view.hosts;
  const int local = view.shape.num_experts / view.shape.num_ranks;
  const int per_block = max(static_cast<int>(ceil_div(args.num_tokens, gridDim.x)), 1);
  const int num_routes = static_cast<int>(ceil_div(args.num_tokens, per_block));
  const int which = static_cast<int>(operation & 1);
  const bool bad = routing.is_bad;
  if (hosts.by_slots != 0) {
    return signal_messages<Link>(view, operation, bad, view.border->rank_messages[which],
                                 [&](int peer) {
                                   int count = num_routes;
                                   for (int i = peer * local; i < (peer + 1) * local; ++i) {
                                     count += min(routing.next[i], view.shape.max_tokens);
                                   }
                                   return count;
                                 });
  }
  if (threadIdx.x < hosts.num_hosts()) routing.host_tokens[threadIdx.x] = 0;
  __syncthreads();
  for (int token = threadIdx.x; token < args.num_tokens; token += kLowLatencyThreads) {
    uint64_t wanted = 0;
    for (int k = 0; k < view.shape.num_slots; ++k) {
      const int host = host_of_pair(args, static_cast<int64_t>(token) * view.shape.num_slots + k);
      if (host >= 0) wanted |= 1ull << host;
    }
    for (; wanted != 0; wanted &= wanted - 1) {
      atomicAdd(&routing.host_tokens[__ffsll(static_cast<long long>(wanted)) - 1], 1);
    }
  }
  __syncthreads();
  signal_messages<Link>(view, operation, bad, view.border->host_messages[which], [&](int peer) {
    return num_routes + routing.host_tokens[hosts.host_of(peer)];
  });
}

// Puts to the ranks of other hosts the counts that lie in `counts_out`. All threads of one block
// call it.
template <typename Link>
__device__ void put_counts(const LowLatencyView& view, const LowLatencyBuffer& buffer) {
  const int me = view.comm.rank, local = view.shape.num_experts / view.shape.num_ranks;
  __threadfence_system();  // what reads them next may be a network card
  __syncthreads();
  for (int i = threadIdx.x / kWarp; i < view.hosts.num_far(); i += kLowLatencyWarps) {
    const int peer = view.hosts.far_rank(i, view.hosts.host_of(me));
    const uint64_t* counts = word_at(view, me, buffer.counts_out, peer * local);
    Link::put_words(view, peer, buffer.counts + me * local * 8,
                    reinterpret_cast<const char*>(counts), local * 8);
  }
}

// Adds to what this rank has put. Called by one lane.
__device__ __forceinline__ void count_puts(const LowLatencyView& view, uint64_t rows,
                                           uint64_t row_bytes, uint64_t other_bytes) {
  const auto add = [](uint64_t* counter, uint64_t value) {
    if (value != 0) atomicAdd(reinterpret_cast<unsigned long long*>(counter), value);
  };
  add(&view.border->rows, rows);
  add(&view.border->bytes, rows * row_bytes);
  add(&view.border->other_bytes, other_bytes);
}

// Layered: each token of the block once to every host that wants it. Returns the rows.
template <typename Link>
__device__ __forceinline__ uint64_t put_to_hosts(const LowLatencyDispatchArgs& args,
                                                 const Share& share, const LowLatencyBuffer& buffer,
                                                 int64_t bytes) {
  const LowLatencyView& view = args.view;
  const LowLatencyHosts& hosts = view.hosts;
  const int me = view.comm.rank, here = hosts.host_of(me), others = hosts.num_hosts() - 1;
  const int lane = threadIdx.x % kWarp, slots = view.shape.num_slots;
  const char* staged = view.comm.peers[me] + buffer.rows;
  uint64_t rows = 0;
  for (int u = threadIdx.x / kWarp; u < (share.end - share.begin) * others; u += kLowLatencyWarps) {
    const int64_t token = share.begin + u / others;
    const int host = staggered_peer(here, u % others, hosts.num_hosts());
    const int mine = lane < slots ? host_of_pair(args, token * slots + lane) : -1;
    if (__any_sync(kAllLanes, mine == host) == 0) continue;
    const int64_t at = token * view.layout.row_bytes;
    Link::put(view, hosts.rail(me, host), hosts.stage(view.layout, buffer, me, host) + at,
              staged + at, bytes, buffer.arrived_host + me * 8);
    ++rows;
  }
  return rows;
}

// By slots: each token of the block to each of its experts on other hosts.
template <typename Link>
__device__ __forceinline__ uint64_t put_to_slots(const LowLatencyDispatchArgs& args,
                                                 const Share& share, const LowLatencyBuffer& buffer,
                                                 int64_t bytes) {
  const LowLatencyView& view = args.view;
  const int me = view.comm.rank, slots = view.shape.num_slots;
  const int local = view.shape.num_experts / view.shape.num_ranks;
  const char* memory = view.comm.peers[me];
  const Route* routes = reinterpret_cast<const Route*>(memory + buffer.routes);
  uint64_t rows = 0;
  for (int u = threadIdx.x / kWarp; u < (share.end - share.begin) * slots; u += kLowLatencyWarps) {
    const int64_t pair = static_cast<int64_t>(share.begin) * slots + u;
    const Route route = routes[pair];
    const int owner = route.expert / local;
    if (route.expert < 0 || is_near<Link>(view, owner)) continue;
    const char* row = memory + buffer.rows + pair / slots * view.layout.row_bytes;
    Link::put(view, owner,
              view.hosts.slot(view.layout, buffer, me, owner, route.expert % local, route.index,
                              view.shape.max_tokens),
              row, bytes, buffer.arrived + me * 8);
    ++rows;
  }
  return rows;
}

// The routes of the block's tokens to all that look for them.
template <typename Link>
__device__ __forceinline__ uint64_t put_routes(const LowLatencyDispatchArgs& args,
                                               const Share& share, const LowLatencyBuffer& buffer) {
  const LowLatencyView& view = args.view;
  const LowLatencyHosts& hosts = view.hosts;
  const int me = view.comm.rank, here = hosts.host_of(me), slots = view.shape.num_slots;
  const int64_t first = static_cast<int64_t>(share.begin) * slots * sizeof(Route);
  const int64_t bytes = static_cast<int64_t>(share.end - share.begin) * slots * sizeof(Route);
  const char* routes = view.comm.peers[me] + buffer.routes + first;
  const bool by_slots = hosts.by_slots != 0;
  const int targets = by_slots ? hosts.num_far() : hosts.num_hosts() - 1;
  uint64_t put = 0;
  if (bytes == 0) return put;
  for (int i = threadIdx.x / kWarp; i < targets; i += kLowLatencyWarps) {
    const int host = staggered_peer(here, i, hosts.num_hosts());
    const int peer = by_slots ? hosts.far_rank(i, here) : hosts.rail(me, host);
    const int64_t at =
        by_slots ? hosts.slot_routes(view.layout, buffer, me, peer,
                                     view.shape.num_experts / view.shape.num_ranks,
                                     view.shape.max_tokens)
                 : hosts.stage(view.layout, buffer, me, host) + buffer.routes - buffer.rows;
    Link::put(view, peer, at + first, routes, bytes,
              (by_slots ? buffer.arrived : buffer.arrived_host) + me * 8);
    put += bytes;
  }
  return put;
}

// Puts what the block has staged. All threads call it.
template <typename Link>
__device__ void put_share(const LowLatencyDispatchArgs& args, const Share& share,
                          const LowLatencyBuffer& buffer) {
  const int hidden = args.view.shape.hidden;
  const int64_t bytes =
      args.fp8 != 0 ? align_up(hidden + hidden / kFp8Block * 4, kVectorBytes) : hidden * 2;
  __threadfence_system();  // what reads the rows next may be a network card
  __syncthreads();
  const uint64_t other = put_routes<Link>(args, share, buffer);
  const uint64_t rows = args.view.hosts.by_slots != 0
                            ? put_to_slots<Link>(args, share, buffer, bytes)
                            : put_to_hosts<Link>(args, share, buffer, bytes);
  if (threadIdx.x % kWarp == 0) count_puts(args.view, rows, bytes, other);
}

// -- where it is found ----------------------------------------------------------------------------

// Layered, and on this rank's own host: what `source` has staged, its rows first.
__device__ __forceinline__ const char* stage_of(const LowLatencyView& view,
                                                const LowLatencyBuffer& buffer, int source) {
  const int host = view.hosts.host_of(view.comm.rank);
  return view.comm.peers[view.hosts.rail(source, host)] +
         view.hosts.stage(view.layout, buffer, source, host);
}

template <typename Link>
__device__ __forceinline__ const char* routes_of(const LowLatencyView& view,
                                                 const LowLatencyBuffer& buffer, int source) {
  if constexpr (Link::kBorder) {
    const int me = view.comm.rank;
    if (view.hosts.by_slots == 0 || is_near<Link>(view, source)) {
      return stage_of(view, buffer, source) + buffer.routes - buffer.rows;
    }
    return view.comm.peers[me] +
           view.hosts.slot_routes(view.layout, buffer, source, me,
                                  view.shape.num_experts / view.shape.num_ranks,
                                  view.shape.max_tokens);
  }
  return view.comm.peers[source] + buffer.routes;
}

}  // namespace moe_ep
