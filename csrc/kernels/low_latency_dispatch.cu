// Low-latency dispatch. Every rank writes its rows to fixed slots [local expert][source rank][slot]
// of the peers; the slot of a (token, expert) is its index among this rank's tokens for the expert,
// so results repeat bit for bit. The receiver packs the rows in order of source rank, then token.
#include "kernels/low_latency_signals.cuh"

namespace moe_ep {
namespace {

constexpr uint32_t kAllLanes = 0xffffffffu;
constexpr int kPairs = 2048;  // (token, k) pairs whose slots a block works out at a time
constexpr int kColumns = 8;   // of a 16-byte vector of bf16
constexpr int kLanesPerScale = kFp8Block / kColumns;

// -- send -----------------------------------------------------------------------------------------

// A block's knowledge of the routing, in shared memory.
struct Routing {
  int32_t next[kMaxExperts + 1];  // next free slot of each expert; [E] counts what is bad
  int32_t slot[kPairs];           // of the pairs at hand, -1: nothing is sent
};

// The expert of pair `i`, -1 where it is unused, E where it is bad.
__device__ __forceinline__ int expert_of(const LowLatencyDispatchArgs& args, int64_t i) {
  const int expert = load_expert(args.topk_idx, args.topk_is_64_bit != 0, i);
  return min(expert, args.view.shape.num_experts);
}

// Counts the pairs before this block's own. All threads call it.
__device__ void count_before(const LowLatencyDispatchArgs& args, Routing& routing, int64_t pairs) {
  for (int i = threadIdx.x; i <= args.view.shape.num_experts; i += kLowLatencyThreads) {
    routing.next[i] = 0;
  }
  __syncthreads();
  for (int64_t i = threadIdx.x; i < pairs; i += kLowLatencyThreads) {
    const int expert = expert_of(args, i);
    if (expert >= 0) atomicAdd(&routing.next[expert], 1);  // a count: the order doesn't matter
  }
  __syncthreads();
}

// Gives pairs [first, first + count) their slots, in order. One warp calls it.
__device__ void assign_slots(const LowLatencyDispatchArgs& args, Routing& routing, int64_t first,
                             int count) {
  const LowLatencyShape& shape = args.view.shape;
  const uint32_t lane = threadIdx.x % kWarp, lower = (1u << lane) - 1;
  for (int begin = 0; begin < count; begin += kWarp) {
    const int i = begin + static_cast<int>(lane);
    const int expert = i < count ? expert_of(args, first + i) : -1;
    const uint32_t same = __match_any_sync(kAllLanes, expert);
    const int slot = expert < 0 ? -1 : routing.next[expert] + __popc(same & lower);
    __syncwarp();
    if (expert >= 0 && same >> lane == 1) routing.next[expert] = slot + 1;  // its highest lane
    __syncwarp();
    const bool sent = slot >= 0 && slot < shape.max_tokens && expert < shape.num_experts;
    if (i < count) routing.slot[i] = sent ? slot : -1;
  }
}

// Quantises one vector of a lane, bit for bit as moe_ep/quant.py; 16 lanes share a scale. All lanes
// of the warp call it.
__device__ __forceinline__ uint2 quantize(const uint4& v, bool power_of_two, float& scale) {
  float f[kColumns];
  unpack(v, f, __nv_bfloat16());
  uint32_t amax = 0;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) amax = max(amax, __float_as_uint(f[j]) & 0x7fffffffu);
#pragma unroll
  for (int step = kLanesPerScale / 2; step > 0; step /= 2) {
    amax = max(amax, __shfl_xor_sync(kAllLanes, amax, step));
  }
  scale = fp8_scale(amax, power_of_two);
#pragma unroll
  for (int j = 0; j < kColumns; ++j) f[j] = __fdiv_rn(f[j], scale);
  return {fp8_quad(f[0], f[1], f[2], f[3]), fp8_quad(f[4], f[5], f[6], f[7])};
}

struct Fp8Piece {
  uint2 q[kVectorsPerLane];
  float scale[kVectorsPerLane];
};

__device__ __forceinline__ void quantize_piece(const Piece& piece, bool power_of_two,
                                               Fp8Piece& out) {
#pragma unroll
  for (int i = 0; i < kVectorsPerLane; ++i) {
    out.q[i] = quantize(piece.v[i], power_of_two, out.scale[i]);
  }
}

// The row begins at `row`; `first` is the piece's first vector.
__device__ __forceinline__ void store_fp8_piece(const Fp8Piece& piece, char* row, int hidden,
                                                int first, int vectors, int lane) {
#pragma unroll
  for (int i = 0; i < kVectorsPerLane; ++i) {
    if (i * kWarp + lane >= vectors) continue;
    const int vector = first + i * kWarp + lane;
    ptx::store_row8(row + vector * kColumns, piece.q[i]);
    if (lane % kLanesPerScale != 0) continue;
    reinterpret_cast<float*>(row + hidden)[vector / kLanesPerScale] = piece.scale[i];
  }
}

// Sends the rows of tokens [first, first + count), whose slots are known. All warps call it.
template <bool kFp8>
__device__ void send_rows(const LowLatencyDispatchArgs& args, const RowShape& row_shape,
                          const LowLatencyBuffer& buffer, const Routing& routing, int first,
                          int count) {
  const LowLatencyView& view = args.view;
  const LowLatencyShape& shape = view.shape;
  const int lane = threadIdx.x % kWarp;
  const int local = shape.num_experts / shape.num_ranks;
  for (int u = threadIdx.x / kWarp; u < count * row_shape.pieces; u += kLowLatencyWarps) {
    const int index = u / row_shape.pieces, piece_index = u % row_shape.pieces;
    const int vectors = row_shape.vectors_of(piece_index);
    const int64_t offset = row_shape.offset_of(piece_index);
    Piece piece;
    load_piece(piece, args.x + (first + index) * row_shape.row_bytes + offset, vectors, lane);
    // Lane k holds the destination of slot k.
    int32_t place = -1, peer = 0;
    if (lane < shape.num_slots) {
      const int slot = routing.slot[index * shape.num_slots + lane];
      const int64_t pair = static_cast<int64_t>(first + index) * shape.num_slots + lane;
      if (slot >= 0) {
        const int expert = expert_of(args, pair);
        peer = expert / local;
        place = (expert % local * shape.num_ranks + view.comm.rank) * shape.max_tokens + slot;
        if (piece_index == 0) {
          reinterpret_cast<int32_t*>(view.comm.peers[peer] + buffer.slots)[place] =
              static_cast<int32_t>(pair);
        }
      }
    }
    Fp8Piece quantized;
    if (kFp8) quantize_piece(piece, args.power_of_two_scales != 0, quantized);
#pragma unroll 1
    for (int k = 0; k < shape.num_slots; ++k) {
      const int64_t at = __shfl_sync(kAllLanes, place, k);
      if (at < 0) continue;
      char* row = view.comm.peers[__shfl_sync(kAllLanes, peer, k)] + buffer.rows +
                  at * view.layout.row_bytes;
      if (kFp8) {
        store_fp8_piece(quantized, row, shape.hidden, static_cast<int>(offset) / kVectorBytes,
                        vectors, lane);
      } else {
        store_piece(piece, row + offset, vectors, lane);
      }
    }
  }
}

// Tells every peer how many rows it got for each of its experts. Called by all threads of the last
// block to arrive.
__device__ void signal_counts(const LowLatencyDispatchArgs& args, const LowLatencyBuffer& buffer,
                              uint64_t operation) {
  const LowLatencyView& view = args.view;
  const LowLatencyShape& shape = view.shape;
  const int local = shape.num_experts / shape.num_ranks;
  bool bad = view.comm.bad_input != 0 || __ldcg(args.counts + shape.num_experts) != 0;
  for (int i = threadIdx.x; i < shape.num_experts; i += kLowLatencyThreads) {
    bad = bad || __ldcg(args.counts + i) > shape.max_tokens;
  }
  bad = __syncthreads_or(bad) != 0;
  for (int i = threadIdx.x; i < shape.num_experts; i += kLowLatencyThreads) {
    // Starting with this rank's own experts: no two ranks begin with the same peer.
    const int expert = (i + view.comm.rank * local) % shape.num_experts;
    const int count = min(__ldcg(args.counts + expert), shape.max_tokens);
    const int place = expert % local * shape.num_ranks + view.comm.rank;
    ptx::store_release_system(word_at(view, expert / local, buffer.dispatch_ready, place),
                              ready_word(operation, view.tag, bad, count));
  }
  if (bad && threadIdx.x == 0) view.comm.host->bad_peer = view.comm.rank + 1;
}

template <bool kFp8>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    dispatch_send_kernel(const __grid_constant__ LowLatencyDispatchArgs args,
                         const __grid_constant__ RowShape row_shape) {
  __shared__ Routing routing;
  const LowLatencyView& view = args.view;
  const CommView& comm = view.comm;
  if (is_aborted(comm)) return;
  const uint64_t operation = comm.control->operation + 1;
  const LowLatencyBuffer& buffer = buffer_of(view, operation);
  const int tokens = args.num_tokens, slots = view.shape.num_slots;
  const int per_block = static_cast<int>(ceil_div(tokens, gridDim.x));
  const int begin = min(static_cast<int>(blockIdx.x) * per_block, tokens);
  const int end = min(begin + per_block, tokens);
  count_before(args, routing, static_cast<int64_t>(begin) * slots);
  if (!wait_buffer_free(view, operation)) return;
  const int step = kPairs / slots;
  for (int first = begin; first < end; first += step) {
    const int count = min(step, end - first);
    if (threadIdx.x < kWarp) {
      assign_slots(args, routing, static_cast<int64_t>(first) * slots, count * slots);
    }
    __syncthreads();
    send_rows<kFp8>(args, row_shape, buffer, routing, first, count);
    __syncthreads();
  }
  if (blockIdx.x == gridDim.x - 1) {  // after the last token: its counts are the totals
    for (int i = threadIdx.x; i <= view.shape.num_experts; i += kLowLatencyThreads) {
      args.counts[i] = routing.next[i];
    }
  }
  if (!arrive_last(&comm.control->arrived_stage)) return;
  signal_counts(args, buffer, operation);
  if (threadIdx.x == 0) finish_send(view, operation, args.ticket);
}

// -- receive --------------------------------------------------------------------------------------

// Block 0 writes what describes the result.
__device__ void describe(const LowLatencyDispatchArgs& args, const int32_t* begin) {
  const LowLatencyShape& shape = args.view.shape;
  const int ranks = shape.num_ranks;
  for (int i = threadIdx.x; i < shape.num_experts; i += kLowLatencyThreads) {
    const int64_t first = begin[i] - begin[i / ranks * ranks];
    args.layout_range[i] = first << 32 | (begin[i + 1] - begin[i]);
  }
  for (int e = threadIdx.x; e < shape.num_experts / ranks; e += kLowLatencyThreads) {
    const int count = begin[(e + 1) * ranks] - begin[e * ranks];
    args.recv_count[e] = count;
    if (args.expert_stats != nullptr) args.expert_stats[e] += count;
  }
}

// The scales of one row, column-major in the result. One warp calls it.
__device__ __forceinline__ void unpack_scales(const LowLatencyDispatchArgs& args,
                                              const float* scales, const PackedRow& row,
                                              int64_t num_rows, int lane) {
  const int num_scales = args.view.shape.hidden / kFp8Block;
  if (args.pack_scales == 0) {
    float* out = static_cast<float*>(args.scales) + row.position;
    for (int i = lane; i < num_scales; i += kWarp) {
      out[(static_cast<int64_t>(row.expert) * num_scales + i) * num_rows] = scales[i];
    }
    return;
  }
  const int words = num_scales / 4;
  uint32_t* out = static_cast<uint32_t*>(args.scales) + row.position;
  for (int i = lane; i < words; i += kWarp) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // of a power of two, the exponent is all there is
      word |= (__float_as_uint(scales[4 * i + j]) >> 23 & 0xffu) << (8 * j);
    }
    out[(static_cast<int64_t>(row.expert) * words + i) * num_rows] = word;
  }
}

template <bool kFp8>
__device__ void pack_rows(const LowLatencyDispatchArgs& args, const RowShape& row_shape,
                          const LowLatencyBuffer& buffer, const int32_t* begin) {
  const LowLatencyView& view = args.view;
  const LowLatencyShape& shape = view.shape;
  const char* own = view.comm.peers[view.comm.rank];
  const int lane = threadIdx.x % kWarp;
  const int64_t num_rows = static_cast<int64_t>(shape.num_ranks) * shape.max_tokens;
  const int64_t total = static_cast<int64_t>(begin[shape.num_experts]) * row_shape.pieces;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kLowLatencyWarps;
  int64_t u = static_cast<int64_t>(blockIdx.x) * kLowLatencyWarps + threadIdx.x / kWarp;
  for (; u < total; u += step) {
    const PackedRow row = find_row(begin, shape, static_cast<int>(u / row_shape.pieces));
    const int piece_index = static_cast<int>(u % row_shape.pieces);
    const int64_t segment = static_cast<int64_t>(row.expert) * shape.num_ranks + row.source;
    const int64_t from = segment * shape.max_tokens + row.index;
    const int64_t to = row.expert * num_rows + row.position;
    const char* source = own + buffer.rows + from * view.layout.row_bytes;
    const int vectors = row_shape.vectors_of(piece_index);
    const int64_t offset = row_shape.offset_of(piece_index);
    Piece piece;
    load_piece(piece, source + offset, vectors, lane);
    store_piece(piece, args.rows + to * row_shape.row_bytes + offset, vectors, lane);
    if (piece_index != 0) continue;
    if (kFp8) {
      const float* scales = reinterpret_cast<const float*>(source + shape.hidden);
      unpack_scales(args, scales, row, num_rows, lane);
    }
    if (lane == 0) {
      const int32_t slot = reinterpret_cast<const int32_t*>(own + buffer.slots)[from];
      args.slots[to] = slot;
      args.src_info[to] = slot / shape.num_slots;
    }
  }
}

template <bool kFp8>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    dispatch_receive_kernel(const __grid_constant__ LowLatencyDispatchArgs args,
                            const __grid_constant__ RowShape row_shape) {
  __shared__ int32_t begin[kMaxExperts + 1];
  __shared__ Waited waited;
  const LowLatencyView& view = args.view;
  if (is_aborted(view.comm)) return;
  const uint64_t operation = *args.ticket;
  const LowLatencyBuffer& buffer = buffer_of(view, operation);
  const int experts = view.shape.num_experts;
  // Word [local expert][source rank] is number i of E.
  if (!wait_words(view, buffer.dispatch_ready, experts, operation, kPhaseDispatchReady, waited,
                  [&](int i, int count) { begin[i] = count; })) {
    return;
  }
  block_exclusive_scan<kLowLatencyThreads>(begin, experts);
  if (blockIdx.x == 0) describe(args, begin);
  add_waiting(view.comm, waited, args.waiting_stats);
  pack_rows<kFp8>(args, row_shape, buffer, begin);
  finish_receive(view, operation);
}

}  // namespace

cudaError_t launch_low_latency_dispatch_send(const LowLatencyDispatchArgs& args, int num_blocks,
                                             cudaStream_t stream) {
  const RowShape shape = row_shape(args.view.layout.row_bytes);  // of x, whatever travels
  if (args.fp8 != 0) {
    dispatch_send_kernel<true><<<num_blocks, kLowLatencyThreads, 0, stream>>>(args, shape);
  } else {
    dispatch_send_kernel<false><<<num_blocks, kLowLatencyThreads, 0, stream>>>(args, shape);
  }
  return cudaGetLastError();
}

cudaError_t launch_low_latency_dispatch_receive(const LowLatencyDispatchArgs& args, int num_blocks,
                                                cudaStream_t stream) {
  if (args.fp8 != 0) {
    const RowShape shape = row_shape(args.view.shape.hidden);
    dispatch_receive_kernel<true><<<num_blocks, kLowLatencyThreads, 0, stream>>>(args, shape);
  } else {
    const RowShape shape = row_shape(args.view.layout.row_bytes);
    dispatch_receive_kernel<false><<<num_blocks, kLowLatencyThreads, 0, stream>>>(args, shape);
  }
  return cudaGetLastError();
}

}  // namespace moe_ep
