// The definitions of DualForwardKernelsOf and DualBackwardKernelsOf, which are
// compiled for each element type separately.

#ifndef JAX_BNAR_CUDA_LAUNCH_DUAL_KERNELS_CUH_
#define JAX_BNAR_CUDA_LAUNCH_DUAL_KERNELS_CUH_

#include <type_traits>

#include "cuda/device/dual_backward.cuh"
#include "cuda/device/dual_forward.cuh"
#include "cuda/device/forms.cuh"
#include "cuda/launch/kernels.cuh"

namespace jax_bnar {
namespace cuda {

template <typename T, Layout kLayout, int kElements, typename Form>
DualForwardKernels DualForwardKernelsAs() {
  return {DualStatisticsKernel<T, kLayout, kElements>,
          DualNormaliseKernel<T, kLayout, kElements, Form>};
}

template <typename T, Layout kLayout, int kElements, typename Form>
DualBackwardKernels DualBackwardKernelsAs() {
  return {DualReduceKernel<T, kLayout, kElements, Form>,
          DualApplyKernel<T, kLayout, kElements, Form>};
}

template <typename T>
DualForwardKernels DualForwardKernelsOf(Layout layout, int width,
                                        Activation activation, bool mask) {
  return WithLayout(layout, [&](auto constant) {
    constexpr Layout kLayout = decltype(constant)::value;
    if constexpr (!std::is_same_v<T, double>) {
      if (width == kWidth) {
        return WithDualForwardForm(activation, mask, [](auto form) {
          return DualForwardKernelsAs<T, kLayout, kWidth, decltype(form)>();
        });
      }
    }
    return DualForwardKernelsAs<T, kLayout, 1, AnyForm>();
  });
}

template <typename T>
DualBackwardKernels DualBackwardKernelsOf(Layout layout, int width, Gate gate,
                                          bool curve) {
  return WithLayout(layout, [&](auto constant) {
    constexpr Layout kLayout = decltype(constant)::value;
    if constexpr (!std::is_same_v<T, double>) {
      if (width == kWidth) {
        return WithDualBackwardForm(gate, curve, [](auto form) {
          using Form = decltype(form);
          if constexpr (HasVectors(2, Form::kGate, Form::kStoreDz,
                                   Form::kCurve)) {
            return DualBackwardKernelsAs<T, kLayout, kWidth, Form>();
          } else {
            return DualBackwardKernels{};  // See HasVectors.
          }
        });
      }
    }
    return DualBackwardKernelsAs<T, kLayout, 1, AnyForm>();
  });
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_LAUNCH_DUAL_KERNELS_CUH_
