// Memory shared through file descriptors of the driver's virtual memory management.
#include "runtime/driver.h"
#include "runtime/memory_block.h"
#include "shared/types.h"

namespace moe_ep {
namespace {

constexpr CUmemAllocationHandleType kHandleType = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = kHandleType;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  prop.location.id = device;
  return prop;
}

// GPUs of one host agree on the granularity, so a peer's block has the size of our own.
size_t rounded(int device, int64_t bytes) {
  const CUmemAllocationProp prop = properties(device);
  size_t granularity = 0;
  check_driver(driver().get_granularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "cuMemGetAllocationGranularity");
  return align_up(bytes, static_cast<int64_t>(granularity));
}

void check_supported(int device) {
  CUdevice handle = 0;
  int supported = 0;
  check_driver(driver().device_get(&handle, device), "cuDeviceGet");
  check_driver(
      driver().device_get_attribute(
          &supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, handle),
      "cuDeviceGetAttribute");
  if (supported == 0) {
    throw std::runtime_error("the GPU cannot share memory through file descriptors");
  }
}

// Physical memory of some device, mapped for `device`.
class FdBlock : public MemoryBlock {
 public:
  // Owns `memory` from here on.
  FdBlock(int device, size_t bytes, CUmemGenericAllocationHandle memory)
      : memory_(memory), bytes_(bytes) {
    try {
      check_driver(driver().address_reserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve");
      check_driver(driver().map(address_, bytes_, 0, memory_, 0), "cuMemMap");
      mapped_ = true;
      CUmemAccessDesc access{};
      access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      access.location.id = device;
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      check_driver(driver().set_access(address_, bytes_, &access, 1), "cuMemSetAccess");
    } catch (...) {
      release();
      throw;
    }
    data_ = reinterpret_cast<char*>(address_);
  }
  ~FdBlock() override { release(); }

  std::string handle() const override {
    int fd = -1;
    check_driver(driver().export_handle(&fd, memory_, kHandleType, 0),
                 "cuMemExportToShareableHandle");
    return write_handle(fd);
  }

 private:
  // Errors of a context that is already gone are nobody's business here.
  void release() {
    if (mapped_) driver().unmap(address_, bytes_);
    if (address_ != 0) driver().address_free(address_, bytes_);
    driver().release(memory_);
  }

  CUmemGenericAllocationHandle memory_;
  size_t bytes_;
  CUdeviceptr address_ = 0;
  bool mapped_ = false;
};

}  // namespace

std::unique_ptr<MemoryBlock> allocate_fd_block(int device, int64_t bytes) {
  check_supported(device);
  const size_t size = rounded(device, bytes);
  const CUmemAllocationProp prop = properties(device);
  CUmemGenericAllocationHandle memory = 0;
  check_driver(driver().create(&memory, size, &prop, 0), "cuMemCreate");
  return std::make_unique<FdBlock>(device, size, memory);
}

std::unique_ptr<MemoryBlock> map_fd_block(int device, int64_t bytes, const std::string& handle) {
  const int fd = read_handle<int>(handle);
  const size_t size = rounded(device, bytes);
  CUmemGenericAllocationHandle memory = 0;
  check_driver(driver().import_handle(&memory, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)),
                                      kHandleType),
               "cuMemImportFromShareableHandle");
  return std::make_unique<FdBlock>(device, size, memory);
}

}  // namespace moe_ep
