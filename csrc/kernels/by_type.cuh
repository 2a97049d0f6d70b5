// From an element type known at run time to a kernel's template parameter.
#pragma once

#include "device/numeric.cuh"

namespace moe_ep {

// Calls launch with a value of the C++ type of `type`, and tells how the launch went.
template <typename Launch>
cudaError_t launch_by_type(DataType type, Launch launch) {
  switch (type) {
    case DataType::kBf16:
      launch(__nv_bfloat16());
      break;
    case DataType::kFp16:
      launch(__half());
      break;
    case DataType::kFp32:
      launch(float());
      break;
  }
  return cudaGetLastError();
}

}  // namespace moe_ep
