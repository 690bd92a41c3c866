// Launches kernels according to a plan.

#ifndef JAX_BNAR_CUDA_LAUNCH_LAUNCH_CUH_
#define JAX_BNAR_CUDA_LAUNCH_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "cuda/host/parameters.h"
#include "cuda/host/plan.h"
#include "cuda/launch/launch_counts.h"
#include "cuda/operations.h"

namespace jax_bnar {
namespace cuda {

// The parts of PrepareKernels, which are defined in forward.cu and backward.cu.
cudaError_t PrepareForwardKernels();
cudaError_t PrepareBackwardKernels();

// Describes the current device, and remembers what the driver says. Some of it
// comes from the device itself, over its bus.
cudaError_t QueryDevice(Device* device);

// The same from memory, if the current device has been queried before.
cudaError_t DescribeDevice(Device* device);

// Whether all buffers are aligned for threads that read eight elements at once.
bool Aligned(std::initializer_list<const void*> buffers);
template <typename T, int N>
bool AreAligned(const PerInput<T, N>& buffers) {
  bool aligned = true;
  for (const void* buffer : buffers) aligned = aligned && Aligned({buffer});
  return aligned;
}

Workspace PlaceWorkspace(const Launch& launch, const Tiling& tiling);

// Enqueues the zeroing of the workspace.
cudaError_t ZeroWorkspace(Launch& launch, const Tiling& tiling);

// Records in launch.failure what a failed launch looked like, and returns its
// error.
cudaError_t Explain(Launch& launch, Kernel name, const Plan& plan,
                    cudaError_t error);

// Loads a kernel, and lets it use all the shared memory that a block may have.
cudaError_t PrepareKernel(const void* kernel);

// Does the same for a kernel of both passes, if it is not null. Its
// multiprocessors are to have as much shared memory as they can, so that two
// blocks fit there.
cudaError_t PrepareWholeKernel(const void* kernel);
template <typename Kernel>
cudaError_t PrepareWhole(Kernel kernel) {
  return PrepareWholeKernel(reinterpret_cast<const void*>(kernel));
}

// Does the same for all kernels that are not null.
template <typename... Kernels>
cudaError_t PrepareEach(Kernels... kernels) {
  cudaError_t error = cudaSuccess;
  for (const void* kernel : {reinterpret_cast<const void*>(kernels)...}) {
    if (error == cudaSuccess && kernel != nullptr) {
      error = PrepareKernel(kernel);
    }
  }
  return error;
}

// Whether all blocks that wait for each other can be resident at once. The
// multiprocessors of the SM margin are left out, because what runs there may
// take any time.
cudaError_t FitsDevice(const Launch& launch, const void* kernel,
                       const Plan& plan, const Device& device, bool* fits);

class LaunchConfig {
 public:
  LaunchConfig(const Launch& launch, const Plan& plan);
  LaunchConfig(const LaunchConfig&) = delete;
  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attributes_[1];
};

template <typename... Parameters, typename... Arguments>
cudaError_t LaunchPlanned(Launch& launch, Kernel name,
                          void (*kernel)(Parameters...), const Plan& plan,
                          const Arguments&... arguments) {
  const LaunchConfig config(launch, plan);
  const cudaError_t error =
      cudaLaunchKernelEx(config.get(), kernel, arguments...);
  if (error != cudaSuccess) return Explain(launch, name, plan, error);
  CountLaunch(name, plan.strategy);
  return cudaSuccess;
}

// Launches a kernel of one pass, or of both, with the parameters of each input.
// It goes through the tiling of the first, and the functions that it calls for
// another one read that of its own.
template <typename Function, typename Parameters, int N, typename... Arguments>
cudaError_t LaunchPass(Launch& launch, Kernel name, Function kernel,
                       const Plan& plan, PerInput<Parameters, N> parameters,
                       const Arguments&... arguments) {
  for (int i = 0; i < N; ++i) {
    parameters[i].tiling = plan.tiling;
    parameters[i].block_reduction = plan.block_reduction;
    // A call without sums has no workspace.
    if (launch.workspace != nullptr) {
      parameters[i].workspace = PlaceWorkspace(launch, plan.tiling);
    }
  }
  // An elementwise pass finds the sums of the pass before it there. A cluster
  // uses no workspace, and may have more blocks than there is room for.
  if (launch.settings.zero_workspace &&
      plan.block_reduction != BlockReduction::kSingleBlock &&
      plan.block_reduction != BlockReduction::kCluster) {
    const cudaError_t error = ZeroWorkspace(launch, plan.tiling);
    if (error != cudaSuccess) return error;
  }
  static_assert(N <= 2, "there are kernels of one and of two inputs");
  if constexpr (N == 1) {
    return LaunchPlanned(launch, name, kernel, plan, parameters[0],
                         arguments...);
  } else {
    return LaunchPlanned(launch, name, kernel, plan, parameters[0],
                         parameters[1], arguments...);
  }
}

// Launches a kernel that does both passes, if the plan has one and its blocks
// fit the device. `launched` says whether it did.
template <typename Parameters>
cudaError_t LaunchWhole(Launch& launch, Kernel name, void (*kernel)(Parameters),
                        const Plan& plan, const Device& device,
                        const Parameters& parameters, bool* launched) {
  *launched = false;
  if (kernel == nullptr || plan.strategy == Strategy::kTwoKernels) {
    return cudaSuccess;
  }
  const cudaError_t error = FitsDevice(
      launch, reinterpret_cast<const void*>(kernel), plan, device, launched);
  if (error != cudaSuccess) return Explain(launch, name, plan, error);
  if (!*launched) return cudaSuccess;
  const cudaError_t failed = LaunchPass(launch, name, kernel, plan,
                                        PerInput<Parameters, 1>{{parameters}});
  if (failed == cudaErrorCooperativeLaunchTooLarge ||
      failed == cudaErrorInvalidClusterSize ||
      failed == cudaErrorLaunchOutOfResources ||
      failed == cudaErrorNotSupported || failed == cudaErrorNotPermitted) {
    // Others share the device, its driver does not do it for this process, or a
    // tool gave the kernel more registers.
    launch.failure.clear();
    *launched = false;
    return cudaSuccess;
  }
  return failed;
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_LAUNCH_LAUNCH_CUH_
