// The definition of ForwardKernelsOf, which is compiled for each element type
// separately.

#ifndef JAX_BNAR_CUDA_LAUNCH_FORWARD_KERNELS_CUH_
#define JAX_BNAR_CUDA_LAUNCH_FORWARD_KERNELS_CUH_

#include <type_traits>

#include "cuda/device/forms.cuh"
#include "cuda/device/forward.cuh"
#include "cuda/device/normalise_flat.cuh"
#include "cuda/device/pack_mask.cuh"
#include "cuda/launch/kernels.cuh"

namespace jax_bnar {
namespace cuda {

template <typename T, Layout kLayout, int kElements, typename Form>
ForwardKernels ForwardKernelsAs() {
  ForwardKernels kernels{};
  kernels.statistics = StatisticsKernel<T, kLayout, kElements>;
  kernels.normalise = NormaliseKernel<T, kLayout, kElements, Form>;
  kernels.pack_mask = PackMaskKernel<T>;
  if constexpr (!std::is_same_v<T, double>) {
    if constexpr (kElements == 1) {
      constexpr bool kCurve = std::is_same_v<Form, AnyCurve>;
      kernels.flat = NormaliseFlatKernel<T, kCurve>;
    }
    if constexpr (!std::is_same_v<Form, AnyCurve>) {
      kernels.whole = ForwardKernel<T, kLayout, kElements, Form>;
    }
  }
  return kernels;
}

template <typename T>
ForwardKernels ForwardKernelsOf(Layout layout, int width, bool residual,
                                Activation activation, bool mask) {
  return WithLayout(layout, [&](auto constant) {
    constexpr Layout kLayout = decltype(constant)::value;
    if constexpr (!std::is_same_v<T, double>) {
      if (width == kWidth) {
        const auto kernels = [](auto form) {
          return ForwardKernelsAs<T, kLayout, kWidth, decltype(form)>();
        };
        return activation.is_curve()
                   ? WithForwardCurve(residual, kernels)
                   : WithForwardForm(residual, activation.is_relu(), mask,
                                     kernels);
      }
    }
    if (activation.is_curve()) {
      return ForwardKernelsAs<T, kLayout, 1, AnyCurve>();
    }
    return ForwardKernelsAs<T, kLayout, 1, AnyForm>();
  });
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_LAUNCH_FORWARD_KERNELS_CUH_
