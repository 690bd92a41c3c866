# There are two Python modules: _native contains the CPU kernels, _cuda the CUDA kernels.
# One stable-ABI binary of each serves Python 3.12 and later; 3.11 needs separate ones.

add_library(bnar_ffi STATIC python_module/ffi_api_version.cc native/ffi_call.cc)
target_include_directories(bnar_ffi SYSTEM PUBLIC "${jaxlib_include}")
target_link_libraries(bnar_ffi PUBLIC bnar_options)
# Handlers are separate targets because nanobind compiles its modules with -Os.
target_compile_options(bnar_ffi PRIVATE -O2)

# What programs for CUDA and the kernels agree on; errors name the package's version.
add_library(bnar_cuda_abi STATIC native/cuda_abi.cc)
target_link_libraries(bnar_cuda_abi PUBLIC bnar_ffi)
target_compile_options(bnar_cuda_abi PRIVATE -O2)
target_compile_definitions(bnar_cuda_abi PRIVATE
  "JAX_BNAR_VERSION=\"${SKBUILD_PROJECT_VERSION}\"")

if(NOT JAX_BNAR_CUDA STREQUAL "ONLY")
  add_library(bnar_cpu_ffi STATIC cpu/ffi_handlers.cc)
  target_link_libraries(bnar_cpu_ffi PUBLIC bnar_ffi bnar_cpu)
  target_compile_options(bnar_cpu_ffi PRIVATE -O2)

  # The planner of the CUDA kernels is host code, which the performance model runs on
  # machines without CUDA.
  include(cmake/CudaSources.cmake)
  add_library(bnar_cuda_planner STATIC ${BNAR_CUDA_PLANNER})
  target_link_libraries(bnar_cuda_planner PUBLIC bnar_options)
  target_compile_options(bnar_cuda_planner PRIVATE -O2)

  nanobind_add_module(_native NB_STATIC STABLE_ABI
    python_module/native_module.cc python_module/cuda_planner.cc python_module/missing_cuda.cc)
  bnar_link_for_manylinux(_native pthread)
  target_link_libraries(_native PRIVATE
    bnar_cpu_ffi bnar_cuda_planner bnar_cuda_abi)
  target_compile_definitions(_native PRIVATE
    "JAX_BNAR_WHY_NO_CUDA=\"${JAX_BNAR_WHY_NO_CUDA}\"")
  install(TARGETS _native LIBRARY DESTINATION jax_bnar)
endif()

if(JAX_BNAR_HAS_CUDA)
  add_library(bnar_cuda_ffi STATIC cuda/ffi_handlers.cc)
  target_link_libraries(bnar_cuda_ffi PUBLIC bnar_cuda_abi bnar_cuda)
  target_compile_options(bnar_cuda_ffi PRIVATE -O2)

  nanobind_add_module(_cuda NB_STATIC STABLE_ABI python_module/cuda_module.cc)
  bnar_link_for_manylinux(_cuda pthread dl rt)
  target_link_libraries(_cuda PRIVATE bnar_cuda_ffi)
  target_compile_definitions(_cuda PRIVATE "JAX_BNAR_CUDA_PTX=${JAX_BNAR_CUDA_PTX}")
  # The module itself is neither compiled nor linked by nvcc.
  set_target_properties(_cuda PROPERTIES
    LINKER_LANGUAGE CXX CUDA_RUNTIME_LIBRARY None)
  if(JAX_BNAR_CUDA STREQUAL "ONLY")
    install(TARGETS _cuda LIBRARY DESTINATION jax_bnar_cuda13)
  else()
    install(TARGETS _cuda LIBRARY DESTINATION jax_bnar)
  endif()
endif()
