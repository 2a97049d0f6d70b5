// A staging slot: wait until it is free, fill it with rows as they are or quantised, say that it is
// filled, say that it was read. Shared by notify and the dispatch kernels.
#pragma once

#include "device/cursor.cuh"
#include "device/grid.cuh"
#include "device/quantize.cuh"
#include "device/rows.cuh"

namespace moe_ep {

// One dispatch, as every block sees it at its start: the last block to end updates the counters.
struct StagingSlot {
  uint64_t operation;     // of this dispatch
  uint64_t last_used_by;  // operation whose readers must be done with the slot
  int64_t offset;         // of the slot in symmetric memory
  int32_t index;
};

__device__ __forceinline__ StagingSlot current_slot(const CommView& comm) {
  StagingSlot slot{};
  slot.operation = comm.control->operation + 1;
  slot.index = static_cast<int32_t>(comm.control->num_stages & 1);
  slot.last_used_by = comm.control->stage_operation[slot.index];
  slot.offset = comm.layout.stage[slot.index];
  return slot;
}

// Copies `bytes` bytes, a multiple of 4 and 16-byte aligned, with all blocks from first_block on.
__device__ __forceinline__ void copy_flat(char* target, const char* source, int64_t bytes,
                                          int first_block = 0) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x - first_block) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x - first_block) * blockDim.x;
  const int64_t vectors = bytes / kVectorBytes;
  for (int64_t first = thread; first < vectors; first += threads * kVectorsPerLane) {
    uint4 v[kVectorsPerLane];
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      const int64_t at = first + i * threads;
      if (at < vectors) v[i] = ptx::load_row16(source + at * kVectorBytes);
    }
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      const int64_t at = first + i * threads;
      if (at < vectors) ptx::store_row16(target + at * kVectorBytes, v[i]);
    }
  }
  for (int64_t at = vectors * kVectorBytes + thread * 4; at < bytes; at += threads * 4) {
    *reinterpret_cast<uint32_t*>(target + at) = *reinterpret_cast<const uint32_t*>(source + at);
  }
}

// Where the parts of a rank's staged rows lie.
struct StagedRows {
  char* rows;     // [T][bytes of a row]
  float* scales;  // [T, H/128], FP8 only
  float* probs;   // [T, K]
};

__device__ __forceinline__ StagedRows staged_rows(const CommView& comm, const StagingSlot& slot,
                                                  int rank) {
  char* stage = comm.peers[rank] + slot.offset;
  return {stage, reinterpret_cast<float*>(stage + comm.layout.stage_scales),
          reinterpret_cast<float*>(stage + comm.layout.stage_probs)};
}

// Copies or quantises this rank's rows into the slot, once it is free, with all blocks from
// first_block on. False: the kernel is to end.
__device__ __forceinline__ bool stage_rows(const CommView& comm, const PlanView& plan,
                                           const StagedSource& source, const StagingSlot& slot,
                                           int first_block = 0) {
  if (!wait_all_peers(comm, Signal::kStageDone, slot.last_used_by, Phase::kStageFree)) return false;
  const StagedRows stage = staged_rows(comm, slot, comm.rank);
  if (source.to_fp8 != 0) {
    quantize(source, plan.num_tokens, stage.rows, stage.scales, first_block);
  } else {
    copy_flat(stage.rows, source.x, plan.num_tokens * source.row_bytes, first_block);
  }
  if (source.probs == nullptr) return true;
  copy_flat(reinterpret_cast<char*>(stage.probs), reinterpret_cast<const char*>(source.probs),
            plan.num_tokens * plan.num_slots * static_cast<int64_t>(sizeof(float)), first_block);
  return true;
}

// A notify that failed on all ranks alike leaves nothing to stage for.
__device__ __forceinline__ bool may_stage(const CommView& comm, const PlanView& plan) {
  const PlanHeader at = plan_header(comm.num_ranks, comm.num_experts / comm.num_ranks);
  return plan.header[at.status] == static_cast<int32_t>(NotifyStatus::kOk);
}

// Tells all peers that the slot is filled. For the block that arrives last.
__device__ __forceinline__ void signal_staged(const CommView& comm, uint64_t operation) {
  if (threadIdx.x >= kWarp) return;
  signal_peers(comm, Signal::kStageReady, signal_word(comm, operation), threadIdx.x);
}

// Ends the operation: tells all peers that their slots were read, once every block has read.
__device__ __forceinline__ void finish_dispatch(const CommView& comm, const StagingSlot& slot,
                                                bool staged) {
  if (!arrive_last(&comm.control->arrived_end)) return;
  if (staged && threadIdx.x < kWarp) {
    signal_peers(comm, Signal::kStageDone, signal_word(comm, slot.operation), threadIdx.x);
  }
  if (threadIdx.x != 0) return;
  comm.control->operation = slot.operation;
  if (!staged) return;
  comm.control->num_stages += 1;
  comm.control->stage_operation[slot.index] = slot.operation;
}

// Zeroes the rows no token fills: the padding of each expert, and what a static capacity leaves.
__device__ __forceinline__ void zero_padding(const CommView& comm, const PlanView& plan, char* rows,
                                             int64_t row_bytes, float* row_probs, float* row_scales,
                                             int num_scales) {
  const int local = comm.num_experts / comm.num_ranks;
  const PlanHeader at = plan_header(comm.num_ranks, local);
  const int lane = threadIdx.x % kWarp;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp;
  auto zero_row = [&](int64_t row) {
    zero_bytes(rows + row * row_bytes, row_bytes, lane);
    if (row_probs != nullptr && lane == 0) row_probs[row] = 0.0f;
    if (row_scales == nullptr) return;
    for (int i = lane; i < num_scales; i += kWarp) row_scales[row * num_scales + i] = 0.0f;
  };
  for (int64_t e = warp; e < local; e += warps) {
    const int begin = plan.header[at.expert_begin + e] + plan.header[at.expert_count + e];
    const int end = plan.header[at.expert_begin + e + 1];
    for (int row = begin; row < end; ++row) zero_row(row);
  }
  for (int64_t row = plan.header[at.num_rows] + warp; row < plan.rows_limit; row += warps) {
    zero_row(row);
  }
}

}  // namespace moe_ep
