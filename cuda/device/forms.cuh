// What a kernel is compiled for: whatever would be a question in its inner
// loops.

#ifndef JAX_BNAR_CUDA_DEVICE_FORMS_CUH_
#define JAX_BNAR_CUDA_DEVICE_FORMS_CUH_

#include "native/host_device.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// One kernel for all forms, which asks once for each slab. Single elements, for
// which a loop has more than its questions to do, have no other.
struct AnyForm {};

// y = act(batch_norm(x) + z): with z, with the ReLU, with the mask of what
// passes it.
template <bool kResidual_, bool kRelu_, bool kMask_>
struct ForwardForm {
  static constexpr bool kResidual = kResidual_;
  static constexpr bool kRelu = kRelu_;
  static constexpr bool kMask = kMask_;
};

// dx and, with kStoreDz, dz, which is e.
template <Gate kGate_, bool kStoreDz_>
struct BackwardForm {
  static constexpr Gate kGate = kGate_;
  static constexpr bool kStoreDz = kStoreDz_;
};

// f(form). Without a ReLU there is no form with a mask. The host calls it with
// functions of the host, the device with its own.
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

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_FORMS_CUH_
