// Memory shared through CUDA IPC handles.
#include <cuda_runtime.h>

#include "runtime/error.h"
#include "runtime/memory_block.h"

namespace moe_ep {
namespace {

class OwnIpcBlock : public MemoryBlock {
 public:
  explicit OwnIpcBlock(int64_t bytes) {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
    data_ = static_cast<char*>(memory);
  }
  // Errors of a context that is already gone are nobody's business here.
  ~OwnIpcBlock() override { cudaFree(data_); }

  std::string handle() const override {
    cudaIpcMemHandle_t handle;
    check_cuda(cudaIpcGetMemHandle(&handle, data_), "cudaIpcGetMemHandle");
    return write_handle(handle);
  }
};

class PeerIpcBlock : public MemoryBlock {
 public:
  explicit PeerIpcBlock(const cudaIpcMemHandle_t& handle) : handle_(handle) {
    void* memory = nullptr;
    check_cuda(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
               "cudaIpcOpenMemHandle");
    data_ = static_cast<char*>(memory);
  }
  ~PeerIpcBlock() override { cudaIpcCloseMemHandle(data_); }

  std::string handle() const override { return write_handle(handle_); }

 private:
  cudaIpcMemHandle_t handle_;
};

}  // namespace

std::unique_ptr<MemoryBlock> allocate_ipc_block(int64_t bytes) {
  return std::make_unique<OwnIpcBlock>(bytes);
}

std::unique_ptr<MemoryBlock> map_ipc_block(const std::string& handle) {
  return std::make_unique<PeerIpcBlock>(read_handle<cudaIpcMemHandle_t>(handle));
}

}  // namespace moe_ep
