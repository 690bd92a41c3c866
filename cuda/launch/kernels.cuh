// One table of kernels for each dtype and width.

#ifndef JAX_BNAR_CUDA_LAUNCH_KERNELS_CUH_
#define JAX_BNAR_CUDA_LAUNCH_KERNELS_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/host/parameters.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// `holding`, `streaming` and `whole` do both passes. Null for float64, which no
// plan sends there, are these and `flat`.
struct ForwardKernels {
  // With tiles in registers, and without.
  void (*holding)(ForwardParameters);
  void (*streaming)(ForwardParameters);
  void (*statistics)(ForwardParameters);
  void (*normalise)(ForwardParameters);
  void (*flat)(ForwardParameters, FlatTiling);  // null but for single elements
  void (*pack_mask)(const void* y, uint8_t* mask, int64_t groups,
                    int64_t group_size, int64_t bytes_per_group);
};

struct BackwardKernels {
  void (*whole)(BackwardParameters);
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

// f(T(), width), both constants: the kernels are templates over them. float64
// is read by single elements only.
template <typename F>
auto WithElementAndWidth(DType dtype, int width, F f) {
  return WithElement(dtype, [&](auto zero) {
    if constexpr (!std::is_same_v<decltype(zero), double>) {
      if (width == kWidth) {
        return f(zero, std::integral_constant<int, kWidth>{});
      }
    }
    return f(zero, std::integral_constant<int, 1>{});
  });
}

// Calls f(dtype, width) for each that has kernels, until an error.
template <typename F>
cudaError_t ForEachKernelSet(F f) {
  for (const DType dtype :
       {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const int width : {1, kWidth}) {
      if (dtype == DType::kFloat64 && width > 1) continue;
      const cudaError_t error = f(dtype, width);
      if (error != cudaSuccess) return error;
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_LAUNCH_KERNELS_CUH_
