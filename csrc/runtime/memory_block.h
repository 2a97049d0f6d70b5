// Device memory that other processes of this host can map, by one of two means.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

namespace moe_ep {

enum class MemoryKind : int32_t {
  kIpc = 0,  // cudaMalloc and CUDA IPC handles
  kFd = 1,   // cuMemCreate and file descriptors: no PID or IPC namespace has to be shared
};

// One rank's memory as this process sees it, its own or a peer's mapped here. It goes with the
// object; the device it was made for must be current then.
class MemoryBlock {
 public:
  virtual ~MemoryBlock() = default;
  char* data() const { return data_; }
  // What a peer needs to map it. kIpc: the bytes of a cudaIpcMemHandle_t. kFd: the bytes of an
  // int, a new file descriptor that the caller closes.
  virtual std::string handle() const = 0;

 protected:
  char* data_ = nullptr;
};

// Each throws std::runtime_error with the CUDA call and the name of its error. `device` must be
// current; mapping a peer's block makes it accessible from there and does not take its handle over.
std::unique_ptr<MemoryBlock> allocate_ipc_block(int64_t bytes);
std::unique_ptr<MemoryBlock> map_ipc_block(const std::string& handle);
std::unique_ptr<MemoryBlock> allocate_fd_block(int device, int64_t bytes);
std::unique_ptr<MemoryBlock> map_fd_block(int device, int64_t bytes, const std::string& handle);

// The handle's bytes as a T.
template <typename T>
T read_handle(const std::string& handle) {
  T value;
  if (handle.size() != sizeof(value)) {
    throw std::runtime_error("it sent a handle of " + std::to_string(handle.size()) +
                             " bytes; they must be " + std::to_string(sizeof(value)));
  }
  std::memcpy(&value, handle.data(), sizeof(value));
  return value;
}
template <typename T>
std::string write_handle(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

}  // namespace moe_ep
