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

// The parts of PrepareKernels, which are defined in forward.cu, backward.cu and
// dual.cu.
cudaError_t PrepareForwardKernels();
cudaError_t PrepareBackwardKernels();
cudaError_t PrepareDualKernels();

// Packs the bits that kernels of single elements cannot write, and the bits of
// y where there is no ReLU, which only tests ask for.
cudaError_t PackMask(Launch& launch, const Problem& problem,
                     const ForwardBuffers& buffers, int width);

// Describes the current device, and remembers what the driver says. Some of it
// comes from the device itself, over its bus.
cudaError_t QueryDevice(Device* device);

// The same from memory, if the current device has been queried before.
cudaError_t DescribeDevice(Device* device);

// Whether all buffers are aligned for threads that read eight elements at once.
bool Aligned(std::initializer_list<const void*> buffers);

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

// Launches a kernel whose blocks add sums.
template <typename Parameters, typename... Parameter, typename... Arguments>
cudaError_t LaunchSums(Launch& launch, Kernel name,
                       void (*kernel)(Parameters, Parameter...),
                       const Plan& plan, Parameters parameters,
                       const Arguments&... arguments) {
  parameters.tiling = plan.tiling;
  parameters.block_reduction = plan.block_reduction;
  parameters.workspace = PlaceWorkspace(launch, plan.tiling);
  if (launch.settings.zero_workspace) {
    const cudaError_t error = ZeroWorkspace(launch, plan.tiling);
    if (error != cudaSuccess) return error;
  }
  return LaunchPlanned(launch, name, kernel, plan, parameters, arguments...);
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
  const cudaError_t failed = LaunchSums(launch, name, kernel, plan, parameters);
  if (failed == cudaErrorCooperativeLaunchTooLarge) {
    // Others share the device, or a tool gave the kernel more registers.
    launch.failure.clear();
    *launched = false;
    return cudaSuccess;
  }
  return failed;
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_LAUNCH_LAUNCH_CUH_
