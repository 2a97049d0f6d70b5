// The CUDA driver's memory functions, looked up when first used: nothing links to libcuda, so that
// the module can be imported where there is none.
#pragma once

#include <cuda.h>

namespace moe_ep {

struct Driver {
  decltype(&cuGetErrorName) get_error_name;
  decltype(&cuDeviceGet) device_get;
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuMemGetAllocationGranularity) get_granularity;
  decltype(&cuMemCreate) create;
  decltype(&cuMemRelease) release;
  decltype(&cuMemExportToShareableHandle) export_handle;
  decltype(&cuMemImportFromShareableHandle) import_handle;
  decltype(&cuMemAddressReserve) address_reserve;
  decltype(&cuMemAddressFree) address_free;
  decltype(&cuMemMap) map;
  decltype(&cuMemUnmap) unmap;
  decltype(&cuMemSetAccess) set_access;
};

// Throws std::runtime_error where the driver lacks one of them.
const Driver& driver();

// Throws std::runtime_error with `what` and the name of the error.
void check_driver(CUresult result, const char* what);

}  // namespace moe_ep
