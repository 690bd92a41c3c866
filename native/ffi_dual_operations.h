// The custom calls of the operations with two normalised inputs. They work like
// those of native/ffi_operations.h.

#ifndef JAX_BNAR_NATIVE_FFI_DUAL_OPERATIONS_H_
#define JAX_BNAR_NATIVE_FFI_DUAL_OPERATIONS_H_

#include <string_view>
#include <utility>

#include "native/ffi_call.h"
#include "native/ffi_operations.h"
#include "native/operations.h"
#include "xla/ffi/api/ffi.h"

namespace jax_bnar {

template <typename Backend>
class FfiDualOperations : private FfiOperations<Backend> {
 public:
  using Base = FfiOperations<Backend>;
  using Native = typename Backend::Native;
  using Args = xla::ffi::RemainingArgs;
  using Rets = xla::ffi::RemainingRets;

  static xla::ffi::Error DualForward(Native native, Args args, Rets rets,
                                     bool has_groups, bool has_inner,
                                     bool has_scale1, bool has_bias1,
                                     bool has_scale2, bool has_bias2,
                                     double epsilon, bool save_mask) {
    FfiCall call(args, rets, /*x=*/0, has_groups, has_inner, "x1");
    DualNormaliseBuffers buffers{};
    buffers.x = ReadBoth(call);
    const Both<AffineOperands> affine =
        ReadAffine(call, has_scale1, has_bias1, has_scale2, has_bias2, epsilon);
    buffers.y = call.ArrayResult("y");
    Both<void*> mean, var;
    mean[0] = call.VectorResult("mean1");
    var[0] = call.VectorResult("var1");
    mean[1] = call.VectorResult("mean2");
    var[1] = call.VectorResult("var2");
    buffers.mask = call.MaskResultIf(save_mask, "mask");
    return Base::Run(native, call, Base::Workspace::kSumsOfBoth,
                     [&](Backend& backend) {
                       return backend.DualForward(call.problem(), buffers,
                                                  affine, mean, var);
                     });
  }

  static xla::ffi::Error DualNormalise(Native native, Args args, Rets rets,
                                       bool has_groups, bool has_inner,
                                       bool has_scale1, bool has_bias1,
                                       bool has_scale2, bool has_bias2,
                                       double epsilon, bool save_mask) {
    FfiCall call(args, rets, /*x=*/0, has_groups, has_inner, "x1");
    DualNormaliseBuffers buffers{};
    buffers.x = ReadBoth(call);
    const Both<AffineOperands> affine =
        ReadAffine(call, has_scale1, has_bias1, has_scale2, has_bias2, epsilon);
    Both<VectorOperand> mean, var;
    mean[0] = call.Vector("mean1");
    var[0] = call.Vector("var1");
    mean[1] = call.Vector("mean2");
    var[1] = call.Vector("var2");
    buffers.y = call.ArrayResult("y");
    buffers.mask = call.MaskResultIf(save_mask, "mask");
    return Base::Run(native, call, Base::Workspace::kNone,
                     [&](Backend& backend) {
                       return backend.DualNormalise(call.problem(), buffers,
                                                    affine, mean, var);
                     });
  }

  static xla::ffi::Error DualBackward(Native native, Args args, Rets rets,
                                      bool has_groups, bool has_inner,
                                      bool has_scale1, bool has_bias1,
                                      bool has_scale2, bool has_bias2,
                                      double epsilon, std::string_view gate) {
    FfiCall call(args, rets, /*x=*/1, has_groups, has_inner, "x1");
    const DualGradientBuffers buffers = ReadGradient(call, gate);
    Both<BackwardOperands> operands{};
    operands[0].mean = call.Vector("mean1");
    operands[0].var = call.Vector("var1");
    operands[1].mean = call.Vector("mean2");
    operands[1].var = call.Vector("var2");
    operands[0].scale = call.VectorIf(has_scale1, "scale1");
    operands[0].bias = call.VectorIf(has_bias1, "bias1");
    operands[1].scale = call.VectorIf(has_scale2, "scale2");
    operands[1].bias = call.VectorIf(has_bias2, "bias2");
    operands[0].dmean = call.Vector("dmean1");
    operands[0].dvar = call.Vector("dvar1");
    operands[1].dmean = call.Vector("dmean2");
    operands[1].dvar = call.Vector("dvar2");
    operands[0].epsilon = operands[1].epsilon = call.CheckEpsilon(epsilon);
    Both<void*> dx, dscale;
    dx[0] = call.ArrayResult("dx1");
    dx[1] = call.ArrayResult("dx2");
    dscale[0] = call.VectorResult("dscale1");
    dscale[1] = call.VectorResult("dscale2");
    void* dbias = call.VectorResult("dbias");
    return Base::Run(native, call, Base::Workspace::kSumsOfBoth,
                     [&](Backend& backend) {
                       return backend.DualBackward(call.problem(), buffers,
                                                   operands, dx, dscale, dbias);
                     });
  }

  static xla::ffi::Error DualBackwardReduce(Native native, Args args, Rets rets,
                                            bool has_groups, bool has_inner,
                                            bool has_scale1, bool has_bias1,
                                            bool has_scale2, bool has_bias2,
                                            double epsilon,
                                            std::string_view gate) {
    FfiCall call(args, rets, /*x=*/1, has_groups, has_inner, "x1");
    const DualGradientBuffers buffers = ReadGradient(call, gate);
    const bool has_var = buffers.gate == Gate::kX;
    Both<ReduceOperands> operands{};
    operands[0].mean = call.Vector("mean1");
    operands[0].var = call.VectorIf(has_var, "var1");
    operands[1].mean = call.Vector("mean2");
    operands[1].var = call.VectorIf(has_var, "var2");
    const Both<AffineOperands> affine =
        ReadAffine(call, has_scale1, has_bias1, has_scale2, has_bias2, epsilon);
    operands[0].affine = affine[0];
    operands[1].affine = affine[1];
    void* sum_e = call.VectorResult("sum_e");
    Both<void*> sum_e_centred;
    sum_e_centred[0] = call.VectorResult("sum_e_centred1");
    sum_e_centred[1] = call.VectorResult("sum_e_centred2");
    return Base::Run(
        native, call, Base::Workspace::kSumsOfBoth, [&](Backend& backend) {
          return backend.DualBackwardReduce(call.problem(), buffers, operands,
                                            sum_e, sum_e_centred);
        });
  }

  static xla::ffi::Error DualBackwardApply(Native native, Args args, Rets rets,
                                           bool has_groups, bool has_inner,
                                           bool has_scale1, bool has_bias1,
                                           bool has_scale2, bool has_bias2,
                                           double epsilon,
                                           std::string_view gate) {
    FfiCall call(args, rets, /*x=*/1, has_groups, has_inner, "x1");
    const DualGradientBuffers buffers = ReadGradient(call, gate);
    Both<ApplyOperands> operands{};
    operands[0].mean = call.Vector("mean1");
    operands[0].var = call.Vector("var1");
    operands[1].mean = call.Vector("mean2");
    operands[1].var = call.Vector("var2");
    const Both<AffineOperands> affine =
        ReadAffine(call, has_scale1, has_bias1, has_scale2, has_bias2, epsilon);
    operands[0].affine = affine[0];
    operands[1].affine = affine[1];
    operands[0].b = call.Vector("b1");
    operands[0].k = call.Vector("k1");
    operands[1].b = call.Vector("b2");
    operands[1].k = call.Vector("k2");
    Both<void*> dx;
    dx[0] = call.ArrayResult("dx1");
    dx[1] = call.ArrayResult("dx2");
    return Base::Run(native, call, Base::Workspace::kNone,
                     [&](Backend& backend) {
                       return backend.DualBackwardApply(call.problem(), buffers,
                                                        operands, dx);
                     });
  }

  // Each function binds what the handler of that name takes after the context,
  // in order.
  template <typename Binding>
  static auto BindDualForward(Binding&& binding) {
    return BindDualNormalise(std::move(binding));
  }

  template <typename Binding>
  static auto BindDualNormalise(Binding&& binding) {
    return BindAffine(std::move(binding)).template Attr<bool>("save_mask");
  }

  template <typename Binding>
  static auto BindDualBackward(Binding&& binding) {
    return BindAffine(std::move(binding))
        .template Attr<std::string_view>("gate");
  }

  template <typename Binding>
  static auto BindDualBackwardReduce(Binding&& binding) {
    return BindDualBackward(std::move(binding));
  }

  template <typename Binding>
  static auto BindDualBackwardApply(Binding&& binding) {
    return BindDualBackward(std::move(binding));
  }

 private:
  template <typename Binding>
  static auto BindAffine(Binding&& binding) {
    return Base::BindShape(std::move(binding))
        .template Attr<bool>("has_scale1")
        .template Attr<bool>("has_bias1")
        .template Attr<bool>("has_scale2")
        .template Attr<bool>("has_bias2")
        .template Attr<double>("epsilon");
  }

  // The elements of a braced list are evaluated in order, as the operands must
  // be read.
  static Both<const void*> ReadBoth(FfiCall& call) {
    return {call.Array("x1"), call.Array("x2")};
  }

  static Both<AffineOperands> ReadAffine(FfiCall& call, bool has_scale1,
                                         bool has_bias1, bool has_scale2,
                                         bool has_bias2, double epsilon) {
    return {Base::ReadAffine(call, has_scale1, has_bias1, epsilon, "1"),
            Base::ReadAffine(call, has_scale2, has_bias2, epsilon, "2")};
  }

  static DualGradientBuffers ReadGradient(FfiCall& call,
                                          std::string_view gate) {
    DualGradientBuffers buffers{};
    buffers.dy = call.Array("dy");
    buffers.x = ReadBoth(call);
    buffers.gate = call.ParseDualGate(gate);
    buffers.saved = call.Saved(buffers.gate);
    return buffers;
  }
};

#define BNAR_DEFINE_DUAL_HANDLER(name, python, suffix, Backend, context, ...) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                              \
      name##suffix, FfiDualOperations<Backend>::name,                         \
      FfiDualOperations<Backend>::Bind##name(context), ##__VA_ARGS__);

// Does for the dual operations what BNAR_DEFINE_HANDLERS does.
#define BNAR_DEFINE_DUAL_HANDLERS(suffix, Backend, ...)                   \
  BNAR_FOR_EACH_DUAL_OPERATION(BNAR_DEFINE_DUAL_HANDLER, suffix, Backend, \
                               __VA_ARGS__)

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_FFI_DUAL_OPERATIONS_H_
