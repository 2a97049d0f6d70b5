#include "runtime/symmetric_memory.h"

#include <cuda_runtime.h>

#include <stdexcept>

#include "runtime/error.h"

namespace moe_ep {
namespace {

std::string describe(cudaError_t error) {
  if (error == cudaSuccess) return "";
  cudaGetLastError();
  return std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ")";
}

}  // namespace

SymmetricMemory::SymmetricMemory(int device, int rank, const SymmetricShape& shape, MemoryKind kind)
    : SymmetricMemory(device, rank, shape, symmetric_layout(shape), kind) {}

SymmetricMemory::SymmetricMemory(int device, int rank, const SymmetricShape& shape,
                                 const SymmetricLayout& layout, MemoryKind kind)
    : device_(device),
      rank_(rank),
      shape_(shape),
      kind_(kind),
      layout_(layout),
      blocks_(shape.num_ranks) {
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  try {
    blocks_[rank_] = kind_ == MemoryKind::kFd ? allocate_fd_block(device_, layout_.total)
                                              : allocate_ipc_block(layout_.total);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("symmetric memory of " + std::to_string(layout_.total) +
                             " bytes for " + std::to_string(shape.max_tokens) +
                             " tokens per rank cannot be allocated: " + error.what());
  }
  // Signals and counts must start at zero; the rest is written before it is read.
  check_cuda(cudaMemset(peer(rank_), 0, layout_.rank_rows), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

SymmetricMemory::~SymmetricMemory() {
  close();
  blocks_.clear();
  cudaGetLastError();
}

std::string SymmetricMemory::handle() const {
  if (shape_.num_ranks == 1) return "";
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  return blocks_[rank_]->handle();
}

std::vector<std::string> SymmetricMemory::open(const std::vector<std::string>& handles) {
  std::vector<std::string> problems(shape_.num_ranks);
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  for (int i = 1; i < shape_.num_ranks; ++i) {
    const int peer = (rank_ + i) % shape_.num_ranks;
    try {
      blocks_[peer] = kind_ == MemoryKind::kFd
                          ? map_fd_block(device_, layout_.total, handles.at(peer))
                          : map_ipc_block(handles.at(peer));
    } catch (const std::runtime_error& error) {
      problems[peer] = error.what();
    }
  }
  return problems;
}

char* SymmetricMemory::signal_word(Signal kind, int owner, int writer) const {
  return peer(owner) + signal_offset(layout_, kind, writer);
}

std::vector<std::string> SymmetricMemory::mark(Signal kind) {
  std::vector<std::string> problems(shape_.num_ranks);
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  const uint64_t mark = static_cast<uint64_t>(rank_) + 1;
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    if (blocks_[peer] == nullptr) continue;
    problems[peer] = describe(
        cudaMemcpy(signal_word(kind, peer, rank_), &mark, sizeof(mark), cudaMemcpyDefault));
  }
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return problems;
}

std::vector<std::string> SymmetricMemory::missing_marks(Signal kind) const {
  std::vector<std::string> problems(shape_.num_ranks);
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    uint64_t mark = 0;
    check_cuda(cudaMemcpy(&mark, signal_word(kind, rank_, peer), sizeof(mark), cudaMemcpyDefault),
               "cudaMemcpy");
    if (mark != static_cast<uint64_t>(peer) + 1) {
      problems[peer] = "left no mark in our memory: " + std::to_string(mark) + " is there";
    }
  }
  return problems;
}

void SymmetricMemory::close() {
  cudaSetDevice(device_);
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    if (peer != rank_) blocks_[peer].reset();
  }
  cudaGetLastError();  // a context that is already gone has nothing mapped
}

}  // namespace moe_ep
