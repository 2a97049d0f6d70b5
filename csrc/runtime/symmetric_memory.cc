#include "runtime/symmetric_memory.h"

#include <cuda_runtime.h>

#include <cstring>

#include "runtime/error.h"

namespace moe_ep {
namespace {

std::string describe(cudaError_t error) {
  if (error == cudaSuccess) return "";
  cudaGetLastError();
  return std::string(cudaGetErrorName(error)) + " (" + cudaGetErrorString(error) + ")";
}

}  // namespace

SymmetricMemory::SymmetricMemory(int device, int rank, const SymmetricShape& shape)
    : device_(device),
      rank_(rank),
      shape_(shape),
      layout_(symmetric_layout(shape)),
      peers_(shape.num_ranks, nullptr) {
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, layout_.total);
  if (error != cudaSuccess) {
    throw std::runtime_error("symmetric memory of " + std::to_string(layout_.total) +
                             " bytes for " + std::to_string(shape.max_tokens) +
                             " tokens per rank cannot be allocated: " + describe(error));
  }
  base_ = static_cast<char*>(memory);
  peers_[rank_] = base_;
  // Signals and counts must start at zero; the rest is written before it is read.
  check_cuda(cudaMemset(base_, 0, layout_.rank_rows), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

SymmetricMemory::~SymmetricMemory() {
  close();
  // Errors of a context that is already gone are nobody's business here.
  if (base_ != nullptr && cudaSetDevice(device_) == cudaSuccess) cudaFree(base_);
  cudaGetLastError();
}

std::string SymmetricMemory::handle() const {
  if (shape_.num_ranks == 1) return "";
  cudaIpcMemHandle_t handle;
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  check_cuda(cudaIpcGetMemHandle(&handle, base_), "cudaIpcGetMemHandle");
  return std::string(reinterpret_cast<const char*>(&handle), sizeof(handle));
}

std::vector<std::string> SymmetricMemory::open(const std::vector<std::string>& handles) {
  std::vector<std::string> problems(shape_.num_ranks);
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  for (int i = 1; i < shape_.num_ranks; ++i) {
    const int peer = (rank_ + i) % shape_.num_ranks;
    cudaIpcMemHandle_t handle;
    if (handles.at(peer).size() != sizeof(handle)) {
      problems[peer] = "sent a handle of " + std::to_string(handles[peer].size()) + " bytes";
      continue;
    }
    std::memcpy(&handle, handles[peer].data(), sizeof(handle));
    void* memory = nullptr;
    problems[peer] =
        describe(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess));
    if (problems[peer].empty()) peers_[peer] = static_cast<char*>(memory);
  }
  return problems;
}

char* SymmetricMemory::signal_word(Signal kind, int owner, int writer) const {
  return peers_[owner] + signal_offset(layout_, kind, writer);
}

std::vector<std::string> SymmetricMemory::mark(Signal kind) {
  std::vector<std::string> problems(shape_.num_ranks);
  check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  const uint64_t mark = static_cast<uint64_t>(rank_) + 1;
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    if (peers_[peer] == nullptr) continue;
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
  if (cudaSetDevice(device_) != cudaSuccess) cudaGetLastError();
  for (int peer = 0; peer < shape_.num_ranks; ++peer) {
    if (peer == rank_ || peers_[peer] == nullptr) continue;
    cudaIpcCloseMemHandle(peers_[peer]);
    peers_[peer] = nullptr;
  }
  cudaGetLastError();
}

}  // namespace moe_ep
