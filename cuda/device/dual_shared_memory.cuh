// What a block keeps in shared memory for two normalised inputs.

#ifndef JAX_BNAR_CUDA_DEVICE_DUAL_SHARED_MEMORY_CUH_
#define JAX_BNAR_CUDA_DEVICE_DUAL_SHARED_MEMORY_CUH_

#include <cuda_runtime.h>

#include "cuda/device/shared_memory.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// The base holds the sums and the constants of x1, `second` those of x2. They
// share the scratch memory and the tiles, which come last.
struct DualSharedMemory : SharedMemory {
  SharedMemory second;

  __device__ __forceinline__ DualSharedMemory() {
    unsigned char* more = reinterpret_cast<unsigned char*>(tiles);
    second.block = reinterpret_cast<Sums*>(more);
    second.total = second.block + kMaxColumns;
    second.constants = reinterpret_cast<double*>(second.total + kMaxColumns);
    tiles = second.tiles =
        reinterpret_cast<uint4*>(more + kSharedBytesPerInput);
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
