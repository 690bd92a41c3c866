// One table of kernels for each dtype, width, layout and form.

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

// `whole` does both passes. It and `flat` are null for float64, because no plan
// uses them for that type. Where single elements meet another activation than
// ReLU, `whole` is null as well: the loops of all of its forms would be the
// largest kernel by far, for arrays whose channels are no multiple of eight.
struct ForwardKernels {
  void (*whole)(ForwardParameters);
  void (*statistics)(ForwardParameters);
  void (*normalise)(ForwardParameters);
  // Null unless elements are read singly.
  void (*flat)(ForwardParameters, FlatTiling);
  void (*pack_mask)(const void* y, uint8_t* mask, Problem, Activation);
};

// `apply` is null where there is a dz, which is read like the dy of a call
// without a gate. `whole` is null as in forward, and where y was saved of
// another activation than ReLU without a residual: y is only read there if mean
// and var are given, and then backward is no whole.
struct BackwardKernels {
  void (*whole)(BackwardParameters);
  void (*reduce)(BackwardParameters, bool whole);
  void (*apply)(BackwardParameters, bool whole);
};

// The kernels for two normalised inputs take the parameters of x1 and those of
// x2.
struct DualForwardKernels {
  void (*statistics)(ForwardParameters, ForwardParameters);
  void (*normalise)(ForwardParameters, ForwardParameters);
};

struct DualBackwardKernels {
  void (*reduce)(BackwardParameters, BackwardParameters, bool whole);
  void (*apply)(BackwardParameters, BackwardParameters, bool whole);
};

// Returns the kernels for elements of type T. float64 is always read by single
// elements, for which one kernel serves all forms without another activation
// than ReLU, and one all others. With two inputs one serves both. The kernels
// of each T are compiled in a file of their own. Backward has a `curve` where a
// gate is given for another activation than ReLU.
template <typename T>
ForwardKernels ForwardKernelsOf(Layout layout, int width, bool residual,
                                Activation activation, bool mask);
template <typename T>
BackwardKernels BackwardKernelsOf(Layout layout, int width, Gate gate,
                                  bool store_dz, bool curve);
template <typename T>
DualForwardKernels DualForwardKernelsOf(Layout layout, int width,
                                        Activation activation, bool mask);
template <typename T>
DualBackwardKernels DualBackwardKernelsOf(Layout layout, int width, Gate gate,
                                          bool curve);

// Whether there are kernels that read vectors for a form of backward. Calls
// with the others get the kernel that reads single elements: masks of other
// activations than ReLU, their y with two inputs, where it is saved only if
// mean and var are given, the second pass alone of a call whose residual would
// be read again, and a dz where there is no residual, for which only tests ask.
constexpr bool HasVectors(int inputs, Gate gate, bool store_dz, bool curve) {
  return gate == Gate::kX   ? !store_dz
         : gate == Gate::kZ ? store_dz
         : gate == Gate::kY ? !curve || inputs == 1
                            : !curve;
}

// Returns f(T()), where T is the element type of a dtype.
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

// Returns f(layout), where the layout is a compile-time constant.
template <typename F>
auto WithLayout(Layout layout, F f) {
  if (layout == Layout::kChannelsFirst) {
    return f(std::integral_constant<Layout, Layout::kChannelsFirst>{});
  }
  return f(std::integral_constant<Layout, Layout::kChannelsLast>{});
}

// Calls f(dtype, layout, width) for each combination that has kernels, until
// one returns an error.
template <typename F>
cudaError_t ForEachKernelSet(F f) {
  for (const DType dtype :
       {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const Layout layout :
         {Layout::kChannelsLast, Layout::kChannelsFirst}) {
      for (const int width : {1, kWidth}) {
        if (dtype == DType::kFloat64 && width > 1) continue;
        const cudaError_t error = f(dtype, layout, width);
        if (error != cudaSuccess) return error;
      }
    }
  }
  return cudaSuccess;
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_LAUNCH_KERNELS_CUH_
