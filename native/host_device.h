// The specifier of functions that CUDA kernels and C++ share.

#ifndef JAX_BNAR_NATIVE_HOST_DEVICE_H_
#define JAX_BNAR_NATIVE_HOST_DEVICE_H_

// Inlining is forced because the CPU's tile kernels are compiled once for each
// instruction set, and the linker must not pick one variant of a function for
// all of them.
#ifdef __CUDACC__
#define BNAR_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define BNAR_HOST_DEVICE inline __attribute__((always_inline))
#endif

#endif  // JAX_BNAR_NATIVE_HOST_DEVICE_H_
