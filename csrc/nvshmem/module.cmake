# The module moe_ep/_C_nvshmem, where NVSHMEM is found.
set(NVSHMEM_DIR "$ENV{NVSHMEM_DIR}" CACHE PATH "NVSHMEM installation: holds include/ and lib/")
set(_nvshmem "${NVSHMEM_DIR}")
if(NOT _nvshmem)
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_nvshmem.py ${CUDAToolkit_VERSION_MAJOR}
    OUTPUT_VARIABLE _nvshmem OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()
if(NOT _nvshmem)
  message(STATUS "moe_ep: no NVSHMEM, no backend for several hosts; to build it: "
                 "pip install nvidia-nvshmem-cu${CUDAToolkit_VERSION_MAJOR}, or set NVSHMEM_DIR")
  return()
endif()
# NVSHMEM's headers take long to compile: a build that is only a check may do with fewer.
set(MOE_EP_NVSHMEM_ARCHS "" CACHE STRING "GPU architectures of kernels that call NVSHMEM")
set(_nvshmem_archs "${_archs}")
if(MOE_EP_NVSHMEM_ARCHS)
  string(REPLACE "." "" _nvshmem_archs "${MOE_EP_NVSHMEM_ARCHS}")
endif()
string(REGEX REPLACE "([0-9]+)([0-9])[a-z]*(;|$)" "\"\\1.\\2\"," _nvshmem_arch_names "${_nvshmem_archs}")
find_file(NVSHMEM_HOST_LIBRARY NAMES libnvshmem_host.so.3 libnvshmem_host.so
          PATHS ${_nvshmem}/lib NO_DEFAULT_PATH REQUIRED)
message(STATUS "moe_ep: NVSHMEM of ${_nvshmem}")

file(GLOB _sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cc ${CMAKE_CURRENT_LIST_DIR}/*.cpp)
file(GLOB _kernels CONFIGURE_DEPENDS ${CMAKE_CURRENT_LIST_DIR}/*.cu)

# Kernels that call NVSHMEM are linked to its device library, on the device: a library of their own,
# so that nothing else becomes relocatable device code.
add_library(moe_ep_nvshmem_kernels STATIC ${_kernels})
set_target_properties(moe_ep_nvshmem_kernels PROPERTIES
  CUDA_ARCHITECTURES "${_nvshmem_archs}" CUDA_SEPARABLE_COMPILATION ON CUDA_VISIBILITY_PRESET hidden)
target_include_directories(moe_ep_nvshmem_kernels PRIVATE csrc)
target_include_directories(moe_ep_nvshmem_kernels SYSTEM PRIVATE ${_nvshmem}/include)
target_compile_options(moe_ep_nvshmem_kernels PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=-v>)

# NO_EXTRAS: the objects of the device link don't survive link-time optimisation.
pybind11_add_module(_C_nvshmem MODULE NO_EXTRAS
  csrc/bindings_nvshmem.cpp
  ${_sources}
  $<TARGET_OBJECTS:moe_ep_runtime>
  $<TARGET_OBJECTS:moe_ep_kernels>)
set_target_properties(_C_nvshmem PROPERTIES
  CUDA_ARCHITECTURES "${_nvshmem_archs}" CXX_VISIBILITY_PRESET hidden CUDA_RESOLVE_DEVICE_SYMBOLS ON
  # Beside this package in site-packages; moe_ep/backends/nvshmem_library.py looks elsewhere too.
  BUILD_RPATH "${_nvshmem}/lib" INSTALL_RPATH "$ORIGIN/../nvidia/nvshmem/lib")
if(NVSHMEM_DIR)
  set_property(TARGET _C_nvshmem APPEND PROPERTY INSTALL_RPATH "${NVSHMEM_DIR}/lib")
endif()
target_include_directories(_C_nvshmem PRIVATE csrc)
target_include_directories(_C_nvshmem SYSTEM PRIVATE ${_nvshmem}/include)
target_compile_definitions(_C_nvshmem PRIVATE "MOE_EP_ARCHITECTURES=${_nvshmem_arch_names}")
target_link_libraries(_C_nvshmem PRIVATE
  moe_ep_nvshmem_kernels ${_nvshmem}/lib/libnvshmem_device.a ${NVSHMEM_HOST_LIBRARY}
  CUDA::cudart_static)
install(TARGETS _C_nvshmem LIBRARY DESTINATION .)
