// The definition of BackwardKernelsOf, which is compiled for each element type
// separately.

#ifndef JAX_BNAR_CUDA_LAUNCH_BACKWARD_KERNELS_CUH_
#define JAX_BNAR_CUDA_LAUNCH_BACKWARD_KERNELS_CUH_

#include <type_traits>

#include "cuda/device/backward.cuh"
#include "cuda/device/forms.cuh"
#include "cuda/launch/kernels.cuh"

namespace jax_bnar {
namespace cuda {

// See BackwardKernels.
template <typename Form>
constexpr bool HasApplyKernel = !Form::kStoreDz;
template <>
inline constexpr bool HasApplyKernel<AnyForm> = true;
template <>
inline constexpr bool HasApplyKernel<AnyCurve> = true;

template <typename Form>
constexpr bool HasWholeKernel = true;
template <>
inline constexpr bool HasWholeKernel<AnyCurve> = false;
template <>
inline constexpr bool HasWholeKernel<
    BackwardForm<Gate::kY, /*kStoreDz=*/false, /*kCurve=*/true>> = false;

template <typename T, Layout kLayout, int kElements, typename Form>
BackwardKernels BackwardKernelsAs() {
  BackwardKernels kernels{};
  kernels.reduce = ReduceKernel<T, kLayout, kElements, Form>;
  if constexpr (HasApplyKernel<Form>) {
    kernels.apply = ApplyKernel<T, kLayout, kElements, Form>;
  }
  if constexpr (!std::is_same_v<T, double> && HasWholeKernel<Form>) {
    kernels.whole = BackwardKernel<T, kLayout, kElements, Form>;
  }
  return kernels;
}

template <typename T>
BackwardKernels BackwardKernelsOf(Layout layout, int width, Gate gate,
                                  bool store_dz, bool curve) {
  return WithLayout(layout, [&](auto constant) {
    constexpr Layout kLayout = decltype(constant)::value;
    if constexpr (!std::is_same_v<T, double>) {
      if (width == kWidth) {
        const auto kernels = [](auto form) {
          using Form = decltype(form);
          if constexpr (HasVectors(1, Form::kGate, Form::kStoreDz,
                                   Form::kCurve)) {
            return BackwardKernelsAs<T, kLayout, kWidth, Form>();
          } else {
            return BackwardKernels{};  // See HasVectors.
          }
        };
        return curve ? WithBackwardCurve(gate, store_dz, kernels)
                     : WithBackwardForm(gate, store_dz, kernels);
      }
    }
    if (curve) return BackwardKernelsAs<T, kLayout, 1, AnyCurve>();
    return BackwardKernelsAs<T, kLayout, 1, AnyForm>();
  });
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_LAUNCH_BACKWARD_KERNELS_CUH_
