// One table of kernels for each dtype and width.

#ifndef JAX_BNAR_CUDA_KERNELS_CUH_
#define JAX_BNAR_CUDA_KERNELS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/parameters.h"
#include "native/problem.h"

namespace jax_bnar {
namespace gpu {

struct ForwardKernels {
  // Null where a plan never asks for it.
  void (*holding)(ForwardParameters);
  void (*streaming)(ForwardParameters);
  void (*statistics)(ForwardParameters);
  void (*normalise)(ForwardParameters);
  void (*pack_mask)(const void* y, uint8_t* mask, int64_t groups,
                    int64_t group_size, int64_t bytes_per_group);
};

struct BackwardKernels {
  void (*holding)(BackwardParameters);
  void (*streaming)(BackwardParameters);
  void (*reduce)(BackwardParameters, bool whole);
  void (*apply)(BackwardParameters, bool whole);
};

// f(T()) with the element type of a dtype.
template <typename F>
auto WithElement(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat16:
      return f(__half{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    case DType::kFloat32:
      return f(float{});
    default:
      return f(double{});
  }
}

// Calls f(dtype, width) for each that has kernels.
template <typename F>
void ForEachKernelSet(F f) {
  for (const DType dtype :
       {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    f(dtype, 1);
    if (dtype != DType::kFloat64) f(dtype, kWidth);
  }
}

}  // namespace gpu
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_KERNELS_CUH_
