// The custom call of each operation, for any platform. It reads the buffers and
// attributes, checks them, and hands them to a backend.
//
// A backend is constructed from what XLA's execution context holds for its
// platform (Backend::Native) and has
//   kTakesMaskChannels   whether Problem::mask_channels may be other than 0
//   void ReadWorkspace(FfiCall&, int inputs)   which reads the hidden
//       workspace for the reductions of `inputs` inputs
//   ffi::Error Forward(...), ...   which run the operations of
//       native/operations.h

#ifndef JAX_BNAR_NATIVE_FFI_OPERATIONS_H_
#define JAX_BNAR_NATIVE_FFI_OPERATIONS_H_

#include <string>
#include <string_view>
#include <utility>

#include "native/ffi_call.h"
#include "native/operations.h"
#include "xla/ffi/api/ffi.h"

namespace jax_bnar {

template <typename Backend>
class FfiOperations {
 public:
  using Native = typename Backend::Native;
  using Args = xla::ffi::RemainingArgs;
  using Rets = xla::ffi::RemainingRets;

  static xla::ffi::Error Forward(Native native, Args args, Rets rets,
                                 bool has_groups, bool has_inner, bool has_z,
                                 bool has_scale, bool has_bias, double epsilon,
                                 std::string_view activation, bool save_mask) {
    FfiCall call(args, rets, /*x=*/0, has_groups, has_inner);
    NormaliseBuffers buffers{};
    buffers.x = call.Array("x");
    buffers.z = call.ArrayIf(has_z, "z");
    const AffineOperands affine =
        ReadAffine(call, has_scale, has_bias, epsilon);
    buffers.relu = call.ParseRelu(activation);
    buffers.y = call.ArrayResult("y");
    void* mean = call.VectorResult("mean");
    void* var = call.VectorResult("var");
    buffers.mask = call.MaskResultIf(save_mask, "mask");
    return Run(native, call, Workspace::kSums, [&](Backend& backend) {
      return backend.Forward(call.problem(), buffers, affine, mean, var);
    });
  }

  static xla::ffi::Error Normalise(Native native, Args args, Rets rets,
                                   bool has_groups, bool has_inner, bool has_z,
                                   bool has_scale, bool has_bias,
                                   double epsilon, std::string_view activation,
                                   bool save_mask) {
    FfiCall call(args, rets, /*x=*/0, has_groups, has_inner);
    NormaliseBuffers buffers{};
    buffers.x = call.Array("x");
    buffers.z = call.ArrayIf(has_z, "z");
    const AffineOperands affine =
        ReadAffine(call, has_scale, has_bias, epsilon);
    const VectorOperand mean = call.Vector("mean");
    const VectorOperand var = call.Vector("var");
    buffers.relu = call.ParseRelu(activation);
    buffers.y = call.ArrayResult("y");
    buffers.mask = call.MaskResultIf(save_mask, "mask");
    return Run(native, call, Workspace::kNone, [&](Backend& backend) {
      return backend.Normalise(call.problem(), buffers, affine, mean, var);
    });
  }

  static xla::ffi::Error Statistics(Native native, Args args, Rets rets,
                                    bool has_groups, bool has_inner) {
    FfiCall call(args, rets, /*x=*/0, has_groups, has_inner);
    const void* x = call.Array("x");
    void* mean = call.VectorResult("mean");
    void* var = call.VectorResult("var");
    return Run(native, call, Workspace::kSums, [&](Backend& backend) {
      return backend.Statistics(call.problem(), x, mean, var);
    });
  }

  static xla::ffi::Error Backward(Native native, Args args, Rets rets,
                                  bool has_groups, bool has_inner,
                                  bool has_scale, bool has_bias, double epsilon,
                                  std::string_view gate, bool has_z) {
    FfiCall call(args, rets, /*x=*/1, has_groups, has_inner);
    const GradientBuffers buffers = ReadGradient(call, gate);
    BackwardOperands operands{};
    operands.mean = call.Vector("mean");
    operands.var = call.Vector("var");
    operands.scale = call.VectorIf(has_scale, "scale");
    operands.bias = call.VectorIf(has_bias, "bias");
    operands.dmean = call.Vector("dmean");
    operands.dvar = call.Vector("dvar");
    operands.epsilon = call.CheckEpsilon(epsilon);
    void* dx = call.ArrayResult("dx");
    void* dscale = call.VectorResult("dscale");
    void* dbias = call.VectorResult("dbias");
    void* dz = call.ArrayResultIf(has_z, "dz");
    return Run(native, call, Workspace::kSums, [&](Backend& backend) {
      return backend.Backward(call.problem(), buffers, operands, dx, dscale,
                              dbias, dz);
    });
  }

  static xla::ffi::Error BackwardReduce(Native native, Args args, Rets rets,
                                        bool has_groups, bool has_inner,
                                        bool has_scale, bool has_bias,
                                        double epsilon, std::string_view gate,
                                        bool has_z) {
    FfiCall call(args, rets, /*x=*/1, has_groups, has_inner);
    const GradientBuffers buffers = ReadGradient(call, gate);
    ReduceOperands operands{};
    operands.mean = call.Vector("mean");
    operands.var = call.VectorIf(buffers.gate == Gate::kX, "var");
    operands.affine = ReadAffine(call, has_scale, has_bias, epsilon);
    void* sum_e = call.VectorResult("sum_e");
    void* sum_e_centred = call.VectorResult("sum_e_centred");
    void* dz = call.ArrayResultIf(has_z, "dz");
    return Run(native, call, Workspace::kSums, [&](Backend& backend) {
      return backend.BackwardReduce(call.problem(), buffers, operands, sum_e,
                                    sum_e_centred, dz);
    });
  }

  static xla::ffi::Error BackwardApply(Native native, Args args, Rets rets,
                                       bool has_groups, bool has_inner,
                                       bool has_scale, bool has_bias,
                                       double epsilon, std::string_view gate) {
    FfiCall call(args, rets, /*x=*/1, has_groups, has_inner);
    const GradientBuffers buffers = ReadGradient(call, gate);
    ApplyOperands operands{};
    operands.mean = call.Vector("mean");
    operands.var = call.Vector("var");
    operands.affine = ReadAffine(call, has_scale, has_bias, epsilon);
    operands.b = call.Vector("b");
    operands.k = call.Vector("k");
    void* dx = call.ArrayResult("dx");
    return Run(native, call, Workspace::kNone, [&](Backend& backend) {
      return backend.BackwardApply(call.problem(), buffers, operands, dx);
    });
  }

  // Each function binds what the handler of that name takes after the context,
  // in order.
  template <typename Binding>
  static auto BindForward(Binding&& binding) {
    return BindNormalise(std::move(binding));
  }

  template <typename Binding>
  static auto BindNormalise(Binding&& binding) {
    return BindShape(std::move(binding))
        .template Attr<bool>("has_z")
        .template Attr<bool>("has_scale")
        .template Attr<bool>("has_bias")
        .template Attr<double>("epsilon")
        .template Attr<std::string_view>("activation")
        .template Attr<bool>("save_mask");
  }

  template <typename Binding>
  static auto BindStatistics(Binding&& binding) {
    return BindShape(std::move(binding));
  }

  template <typename Binding>
  static auto BindBackward(Binding&& binding) {
    return BindBackwardApply(std::move(binding)).template Attr<bool>("has_z");
  }

  template <typename Binding>
  static auto BindBackwardReduce(Binding&& binding) {
    return BindBackward(std::move(binding));
  }

  template <typename Binding>
  static auto BindBackwardApply(Binding&& binding) {
    return BindShape(std::move(binding))
        .template Attr<bool>("has_scale")
        .template Attr<bool>("has_bias")
        .template Attr<double>("epsilon")
        .template Attr<std::string_view>("gate");
  }

 protected:
  // For how many inputs an operation has sums in a workspace.
  enum class Workspace { kNone = 0, kSums = 1, kSumsOfBoth = 2 };

  template <typename Binding>
  static auto BindShape(Binding&& binding) {
    return std::move(binding)
        .RemainingArgs()
        .RemainingRets()
        .template Attr<bool>("has_groups")
        .template Attr<bool>("has_inner");
  }

  // `number` is appended to the names of the operands in errors.
  static AffineOperands ReadAffine(FfiCall& call, bool has_scale, bool has_bias,
                                   double epsilon,
                                   const std::string& number = "") {
    AffineOperands affine{};
    affine.scale = call.VectorIf(has_scale, ("scale" + number).c_str());
    affine.bias = call.VectorIf(has_bias, ("bias" + number).c_str());
    affine.epsilon = call.CheckEpsilon(epsilon);
    return affine;
  }

  static GradientBuffers ReadGradient(FfiCall& call, std::string_view gate) {
    GradientBuffers buffers{};
    buffers.dy = call.Array("dy");
    buffers.x = call.Array("x");
    buffers.gate = call.ParseGate(gate);
    buffers.saved = call.Saved(buffers.gate);
    return buffers;
  }

  template <typename F>
  static xla::ffi::Error Run(Native native, FfiCall& call, Workspace workspace,
                             F f) {
    Backend backend(native);
    if (!Backend::kTakesMaskChannels) call.RequireMaskInOrder();
    if (workspace != Workspace::kNone) {
      backend.ReadWorkspace(call, static_cast<int>(workspace));
    }
    xla::ffi::Error error = call.Finish();
    if (error.failure()) return error;
    return f(backend);
  }
};

#define BNAR_DEFINE_HANDLER(name, python, suffix, Backend, context, ...) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                         \
      name##suffix, FfiOperations<Backend>::name,                        \
      FfiOperations<Backend>::Bind##name(context), ##__VA_ARGS__);

// Defines the handlers Forward<suffix>, Backward<suffix> and so on. The
// argument after the backend is the binding of the context from which
// Backend::Native is decoded; the traits of the handlers may follow.
#define BNAR_DEFINE_HANDLERS(suffix, Backend, ...) \
  BNAR_FOR_EACH_OPERATION(BNAR_DEFINE_HANDLER, suffix, Backend, __VA_ARGS__)

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_FFI_OPERATIONS_H_
