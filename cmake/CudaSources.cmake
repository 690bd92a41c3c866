# The sources of the CUDA kernels, listed once: for nvcc (CudaKernels.cmake), and for
# the tests, which compile them as C++ and run them on an emulated device.

# With device code. build_info.cu is about nvcc's own build.
set(BNAR_CUDA_KERNELS launch/backward.cu launch/forward.cu launch/launch.cu)
# Plain C++.
set(BNAR_CUDA_HOST
  host/plan.cc host/settings.cc host/tiling.cc host/workspace.cc
  launch/launch_counts.cc)
list(TRANSFORM BNAR_CUDA_KERNELS PREPEND "${CMAKE_CURRENT_LIST_DIR}/../cuda/")
list(TRANSFORM BNAR_CUDA_HOST PREPEND "${CMAKE_CURRENT_LIST_DIR}/../cuda/")
