# This is the only list of the CUDA sources. CudaKernels.cmake compiles them with nvcc;
# the tests compile them as C++ and run them on an emulated device.

# These sources contain device code. build_info.cu is not among them, because it describes
# the build by nvcc itself.
set(BNAR_CUDA_KERNELS launch/backward.cu launch/forward.cu launch/launch.cu)
# Each element type has a file of its own for backward, for forward and for two inputs.
foreach(element IN ITEMS f16 bf16 f32 f64)
  list(APPEND BNAR_CUDA_KERNELS
    launch/backward_${element}.cu launch/forward_${element}.cu launch/dual_${element}.cu)
endforeach()
# These sources are plain C++. The planner is also part of the module of the CPU kernels.
set(BNAR_CUDA_PLANNER
  host/cost.cc host/plan.cc host/tiling.cc host/workspace.cc)
set(BNAR_CUDA_HOST
  ${BNAR_CUDA_PLANNER} host/known_plans.cc host/settings.cc launch/launch_counts.cc)
list(TRANSFORM BNAR_CUDA_KERNELS PREPEND "${CMAKE_CURRENT_LIST_DIR}/../cuda/")
list(TRANSFORM BNAR_CUDA_PLANNER PREPEND "${CMAKE_CURRENT_LIST_DIR}/../cuda/")
list(TRANSFORM BNAR_CUDA_HOST PREPEND "${CMAKE_CURRENT_LIST_DIR}/../cuda/")
