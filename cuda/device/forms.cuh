// The forms that kernels are compiled for. A form fixes everything that the
// inner loops would otherwise have to test.

#ifndef JAX_BNAR_CUDA_DEVICE_FORMS_CUH_
#define JAX_BNAR_CUDA_DEVICE_FORMS_CUH_

#include "native/host_device.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// One kernel that serves all forms and tests once for each slab which one it
// is. Kernels that read single elements have no other form, because their loops
// do far more than such a test costs.
struct AnyForm {};

// The same for all forms with another activation than ReLU, which have larger
// loops.
struct AnyCurve {};

// A form of y = act(batch_norm(x) + z): whether there is a z, whether there is
// a ReLU or another activation (curves.cuh), and whether the mask of the
// elements that pass a ReLU is written.
template <bool kResidual_, bool kRelu_, bool kMask_, bool kCurve_ = false>
struct ForwardForm {
  static constexpr bool kResidual = kResidual_;
  static constexpr bool kRelu = kRelu_;
  static constexpr bool kMask = kMask_;
  static constexpr bool kCurve = kCurve_;
};

// A form of the backward pass, which computes dx and, with kStoreDz, also
// writes dz, which is e.
template <Gate kGate_, bool kStoreDz_, bool kCurve_ = false>
struct BackwardForm {
  static constexpr Gate kGate = kGate_;
  static constexpr bool kStoreDz = kStoreDz_;
  static constexpr bool kCurve = kCurve_;
};

// Returns f(form). Without a ReLU, there is no form with a mask. The host calls
// these functions with host functions, and the device with device functions.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename F>
BNAR_HOST_DEVICE auto WithForwardForm(bool residual, bool relu, bool mask,
                                      F f) {
  if (residual) {
    if (!relu) return f(ForwardForm<true, false, false>{});
    if (mask) return f(ForwardForm<true, true, true>{});
    return f(ForwardForm<true, true, false>{});
  }
  if (!relu) return f(ForwardForm<false, false, false>{});
  if (mask) return f(ForwardForm<false, true, true>{});
  return f(ForwardForm<false, true, false>{});
}

// The gate is not kZ, which only other activations than ReLU have.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename F>
BNAR_HOST_DEVICE auto WithBackwardForm(Gate gate, bool store_dz, F f) {
  switch (gate) {
    case Gate::kY:
      if (store_dz) return f(BackwardForm<Gate::kY, true>{});
      return f(BackwardForm<Gate::kY, false>{});
    case Gate::kMask:
      if (store_dz) return f(BackwardForm<Gate::kMask, true>{});
      return f(BackwardForm<Gate::kMask, false>{});
    case Gate::kX:
      if (store_dz) return f(BackwardForm<Gate::kX, true>{});
      return f(BackwardForm<Gate::kX, false>{});
    default:
      if (store_dz) return f(BackwardForm<Gate::kNone, true>{});
      return f(BackwardForm<Gate::kNone, false>{});
  }
}

// The same with another activation than ReLU, whose mask is never written here.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename F>
BNAR_HOST_DEVICE auto WithForwardCurve(bool residual, F f) {
  if (residual) return f(ForwardForm<true, false, false, true>{});
  return f(ForwardForm<false, false, false, true>{});
}

#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename F>
BNAR_HOST_DEVICE auto WithBackwardCurve(Gate gate, bool store_dz, F f) {
  switch (gate) {
    case Gate::kY:
      if (store_dz) return f(BackwardForm<Gate::kY, true, true>{});
      return f(BackwardForm<Gate::kY, false, true>{});
    case Gate::kMask:
      if (store_dz) return f(BackwardForm<Gate::kMask, true, true>{});
      return f(BackwardForm<Gate::kMask, false, true>{});
    case Gate::kX:
      if (store_dz) return f(BackwardForm<Gate::kX, true, true>{});
      return f(BackwardForm<Gate::kX, false, true>{});
    default:
      if (store_dz) return f(BackwardForm<Gate::kZ, true, true>{});
      return f(BackwardForm<Gate::kZ, false, true>{});
  }
}

// The same for y = act(batch_norm(x1) + batch_norm(x2)), where x2 takes the
// place of z. AnyForm is any of these forms here, also one with another
// activation than ReLU.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename F>
BNAR_HOST_DEVICE auto WithDualForwardForm(Activation activation, bool mask,
                                          F f) {
  if (activation.is_curve()) return f(ForwardForm<true, false, false, true>{});
  if (!activation.is_relu()) return f(ForwardForm<true, false, false>{});
  if (mask) return f(ForwardForm<true, true, true>{});
  return f(ForwardForm<true, true, false>{});
}

// Its gradient never has a dz.
#ifdef __CUDACC__
#pragma nv_exec_check_disable
#endif
template <typename F>
BNAR_HOST_DEVICE auto WithDualBackwardForm(Gate gate, bool curve, F f) {
  switch (gate) {
    case Gate::kY:
      if (curve) return f(BackwardForm<Gate::kY, false, true>{});
      return f(BackwardForm<Gate::kY, false>{});
    case Gate::kMask:
      if (curve) return f(BackwardForm<Gate::kMask, false, true>{});
      return f(BackwardForm<Gate::kMask, false>{});
    case Gate::kX:
      if (curve) return f(BackwardForm<Gate::kX, false, true>{});
      return f(BackwardForm<Gate::kX, false>{});
    default:
      return f(BackwardForm<Gate::kNone, false>{});
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_FORMS_CUH_
