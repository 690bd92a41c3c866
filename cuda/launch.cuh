// From a plan to a launch.

#ifndef JAX_BNAR_CUDA_LAUNCH_CUH_
#define JAX_BNAR_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>

#include "cuda/operations.h"
#include "cuda/parameters.h"
#include "cuda/plan.h"

namespace jax_bnar {
namespace gpu {

// The current device. Asked each time: the driver answers from memory.
cudaError_t QueryDevice(Device* device);

// Whether threads may read eight elements at once there.
bool Aligned(std::initializer_list<const void*> buffers);

Workspace PlaceWorkspace(const Launch& launch, const Tiling& tiling);

// Zeroes the counters of a plan whose blocks meet in global memory.
cudaError_t ResetCounters(Launch& launch, const Plan& plan);

// Keeps what a failed launch looked like.
cudaError_t Explain(Launch& launch, const char* name, const Plan& plan,
                    cudaError_t error);

// Lets the kernel use all the shared memory of a block, and loads it.
cudaError_t PrepareKernel(const void* kernel);

// Whether all blocks that wait for each other can be resident at once. The
// margin counts: what runs there may take its time.
cudaError_t FitsDevice(const void* kernel, const Plan& plan,
                       const Device& device, const Settings& settings,
                       bool* fits);

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
cudaError_t LaunchPlanned(Launch& launch, const char* name,
                          void (*kernel)(Parameters...), const Plan& plan,
                          const Arguments&... arguments) {
  const LaunchConfig config(launch, plan);
  return Explain(launch, name, plan,
                 cudaLaunchKernelEx(config.get(), kernel, arguments...));
}

}  // namespace gpu
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_LAUNCH_CUH_
