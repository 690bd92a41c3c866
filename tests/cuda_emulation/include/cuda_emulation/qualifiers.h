// CUDA's qualifiers for a host compiler.
//
// Three are absent deliberately, so that using them fails to compile:
// __shared__ (a static variable would be shared by all blocks; use
// cuda_emulation::DynamicShared), __constant__ and __cluster_dims__.

#ifndef CUDA_EMULATION_QUALIFIERS_H_
#define CUDA_EMULATION_QUALIFIERS_H_

// libstdc++ writes __attribute__((__noinline__)) in this header. It is included
// here because the macro below would break it if it were read later.
#include <memory>

#ifdef __CUDACC__
#error "the emulation is for host compilers, not for nvcc"
#endif

#define JAX_BNAR_CUDA_EMULATION 1

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __launch_bounds__(...)
// Without optimisation, a kernel that calls its parts compiles in half of the
// time of one that contains them.
#ifdef __OPTIMIZE__
#define __forceinline__ inline __attribute__((always_inline))
#else
#define __forceinline__ inline
#endif
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))

#endif  // CUDA_EMULATION_QUALIFIERS_H_
