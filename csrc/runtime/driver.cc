#include "runtime/driver.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "runtime/error.h"

namespace moe_ep {
namespace {

// Every function below has had its signature since CUDA 10.2; this core needs 11.3 for the rest.
constexpr unsigned int kDriverApi = 11030;

void* find(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, kDriverApi, cudaEnableDefault, &found);
#elif CUDART_VERSION >= 12000
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault);
  found = cudaDriverEntryPointSuccess;
#endif
  check_cuda(error, name);
  if (found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw std::runtime_error(std::string("the CUDA driver has no ") + name + "; update the driver");
  }
  return function;
}

template <typename Function>
void find_into(Function& function, const char* name) {
  function = reinterpret_cast<Function>(find(name));
}

Driver load() {
  Driver driver{};
  find_into(driver.get_error_name, "cuGetErrorName");
  find_into(driver.device_get, "cuDeviceGet");
  find_into(driver.device_get_attribute, "cuDeviceGetAttribute");
  find_into(driver.get_granularity, "cuMemGetAllocationGranularity");
  find_into(driver.create, "cuMemCreate");
  find_into(driver.release, "cuMemRelease");
  find_into(driver.export_handle, "cuMemExportToShareableHandle");
  find_into(driver.import_handle, "cuMemImportFromShareableHandle");
  find_into(driver.address_reserve, "cuMemAddressReserve");
  find_into(driver.address_free, "cuMemAddressFree");
  find_into(driver.map, "cuMemMap");
  find_into(driver.unmap, "cuMemUnmap");
  find_into(driver.set_access, "cuMemSetAccess");
  return driver;
}

}  // namespace

const Driver& driver() {
  static const Driver loaded = load();  // tried again after it threw
  return loaded;
}

void check_driver(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  if (driver().get_error_name(result, &name) != CUDA_SUCCESS || name == nullptr) {
    name = "an error unknown to the driver";
  }
  throw std::runtime_error(std::string(what) + ": " + name + " (" + std::to_string(result) + ")");
}

}  // namespace moe_ep
