// Errors of the runtime become Python's RuntimeError with the call that failed.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace moe_ep {

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // not to be seen again by the next check
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + " (" +
                           cudaGetErrorString(error) + ")");
}

}  // namespace moe_ep
