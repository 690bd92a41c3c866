// What a block keeps in shared memory for two normalised inputs.

#ifndef JAX_BNAR_CUDA_DEVICE_DUAL_SHARED_MEMORY_CUH_
#define JAX_BNAR_CUDA_DEVICE_DUAL_SHARED_MEMORY_CUH_

#include <cuda_runtime.h>

#include "cuda/device/shared_memory.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// The base holds the sums and the constants of x1, `second` those of x2. They
// share the scratch memory. There are no tiles.
struct DualSharedMemory : SharedMemory {
  SharedMemory second;

  __device__ __forceinline__ DualSharedMemory() {
    second.Place(reinterpret_cast<unsigned char*>(sums) + kSharedBytesPerInput);
  }

  // Adds the constant of x2 to that of x1, in the thread that has set both. It
  // is for the biases, which always come together.
  template <typename A>
  __device__ __forceinline__ void AddConstants(int which, int column) const {
    Constant<A>(which)[column] += second.Constant<A>(which)[column];
  }
};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_DUAL_SHARED_MEMORY_CUH_
