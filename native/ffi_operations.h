// The custom calls of the operations, for any platform and number of inputs.
// They read the buffers and attributes, check them, and hand them to a backend.
//
// A backend is constructed from what XLA's execution context holds for its
// platform (Backend::Native) and has
//   kTakesMaskChannels   whether Problem::mask_channels may be other than 0
//   kTakesFloat32Outputs whether Problem::out_dtype may be kFloat32 with 16-bit
//       x, if there is one input
//   void ReadWorkspace(FfiCall&, int inputs)   which reads the hidden
//       workspace for the reductions of `inputs` inputs
//   ffi::Error Forward(...), ...   which run the operations of
//       native/operations.h
//
// native/ffi_targets.h has the attributes of each custom call.

#ifndef JAX_BNAR_NATIVE_FFI_OPERATIONS_H_
#define JAX_BNAR_NATIVE_FFI_OPERATIONS_H_

#include <string>
#include <string_view>

#include "native/ffi_call.h"
#include "native/operations.h"
#include "xla/ffi/api/ffi.h"

namespace jax_bnar {

// The attributes that every operation has.
struct ShapeAttributes {
  bool has_groups;
  bool has_inner;
};

// Which vectors of each input there are.
template <int N>
struct AffineAttributes {
  PerInput<bool, N> has_scale;
  PerInput<bool, N> has_bias;
  double epsilon;
};

struct ActivationAttributes {
  std::string_view name;
  double negative_slope;
};

struct NormaliseAttributes {
  bool has_z;
  ActivationAttributes activation;
  bool save_mask;
};

struct GateAttributes {
  std::string_view gate;
  ActivationAttributes activation;
};

// An operation for N inputs. With more than one, errors number their operands.
template <typename Backend, int N>
class FfiOperations {
 public:
  using Error = xla::ffi::Error;
  using Native = typename Backend::Native;
  using Args = xla::ffi::RemainingArgs;
  using Rets = xla::ffi::RemainingRets;
  using Affine = AffineAttributes<N>;

  static Error Forward(Native native, Args args, Rets rets,
                       ShapeAttributes shape, const Affine& attributes,
                       const NormaliseAttributes& normalise) {
    FfiCall call = ForwardCall(args, rets, shape);
    NormaliseBuffers<N> buffers = ReadNormalised(call, normalise);
    const auto affine = ReadAffine(call, attributes);
    buffers.activation = ReadActivation(call, normalise.activation);
    if (normalise.save_mask) call.RequireMaskable(buffers.activation);
    buffers.y = call.ArrayResult(Like::kY, "y");
    PerInput<void*, N> mean, var;
    for (int i = 0; i < N; ++i) {
      mean[i] = call.VectorResult(Name("mean", i).c_str());
      var[i] = call.VectorResult(Name("var", i).c_str());
    }
    buffers.mask = call.MaskResultIf(normalise.save_mask, "mask");
    return Run(native, call, /*summed_inputs=*/N, [&](Backend& backend) {
      return backend.Forward(call.problem(), buffers, affine, mean, var);
    });
  }

  static Error Normalise(Native native, Args args, Rets rets,
                         ShapeAttributes shape, const Affine& attributes,
                         const NormaliseAttributes& normalise) {
    FfiCall call = ForwardCall(args, rets, shape);
    NormaliseBuffers<N> buffers = ReadNormalised(call, normalise);
    const auto affine = ReadAffine(call, attributes);
    PerInput<VectorOperand, N> mean, var;
    for (int i = 0; i < N; ++i) {
      mean[i] = call.Vector(Name("mean", i).c_str());
      var[i] = call.Vector(Name("var", i).c_str());
    }
    buffers.activation = ReadActivation(call, normalise.activation);
    if (normalise.save_mask) call.RequireMaskable(buffers.activation);
    buffers.y = call.ArrayResult(Like::kY, "y");
    buffers.mask = call.MaskResultIf(normalise.save_mask, "mask");
    return Run(native, call, /*summed_inputs=*/0, [&](Backend& backend) {
      return backend.Normalise(call.problem(), buffers, affine, mean, var);
    });
  }

  static Error Statistics(Native native, Args args, Rets rets,
                          ShapeAttributes shape) {
    static_assert(N == 1, "each input has statistics of its own");
    FfiCall call = Call(args, rets, /*x=*/0, shape);
    const void* x = call.Array(Like::kX, "x");
    void* mean = call.VectorResult("mean");
    void* var = call.VectorResult("var");
    return Run(native, call, /*summed_inputs=*/1, [&](Backend& backend) {
      return backend.Statistics(call.problem(), x, mean, var);
    });
  }

  static Error Backward(Native native, Args args, Rets rets,
                        ShapeAttributes shape, const Affine& attributes,
                        const GateAttributes& gate, bool has_z) {
    FfiCall call = BackwardCall(args, rets, shape);
    const GradientBuffers<N> buffers = ReadGradient(call, gate);
    PerInput<BackwardOperands, N> operands{};
    for (int i = 0; i < N; ++i) {
      operands[i].mean = call.Vector(Name("mean", i).c_str());
      operands[i].var = call.Vector(Name("var", i).c_str());
    }
    const auto affine = ReadAffine(call, attributes);
    for (int i = 0; i < N; ++i) {
      operands[i].scale = affine[i].scale;
      operands[i].bias = affine[i].bias;
      operands[i].epsilon = affine[i].epsilon;
      operands[i].dmean = call.Vector(Name("dmean", i).c_str());
      operands[i].dvar = call.Vector(Name("dvar", i).c_str());
    }
    const auto dx = GradientResults(call);
    const auto dscale = VectorResults(call, "dscale");
    void* dbias = call.VectorResult("dbias");
    void* dz = call.ArrayResultIf(has_z, Like::kY, "dz");
    return Run(native, call, /*summed_inputs=*/N, [&](Backend& backend) {
      return backend.Backward(call.problem(), buffers, operands, dx, dscale,
                              dbias, dz);
    });
  }

  static Error BackwardReduce(Native native, Args args, Rets rets,
                              ShapeAttributes shape, const Affine& attributes,
                              const GateAttributes& gate, bool has_z) {
    FfiCall call = BackwardCall(args, rets, shape);
    const GradientBuffers<N> buffers = ReadGradient(call, gate);
    const bool has_var = Recomputes(buffers.gate);
    PerInput<ReduceOperands, N> operands{};
    for (int i = 0; i < N; ++i) {
      operands[i].mean = call.Vector(Name("mean", i).c_str());
      operands[i].var = call.VectorIf(has_var, Name("var", i).c_str());
    }
    const auto affine = ReadAffine(call, attributes);
    for (int i = 0; i < N; ++i) operands[i].affine = affine[i];
    void* sum_e = call.VectorResult("sum_e");
    const auto sum_e_centred = VectorResults(call, "sum_e_centred");
    void* dz = call.ArrayResultIf(has_z, Like::kY, "dz");
    return Run(native, call, /*summed_inputs=*/N, [&](Backend& backend) {
      return backend.BackwardReduce(call.problem(), buffers, operands, sum_e,
                                    sum_e_centred, dz);
    });
  }

  static Error BackwardApply(Native native, Args args, Rets rets,
                             ShapeAttributes shape, const Affine& attributes,
                             const GateAttributes& gate) {
    FfiCall call = BackwardCall(args, rets, shape);
    const GradientBuffers<N> buffers = ReadGradient(call, gate);
    PerInput<ApplyOperands, N> operands{};
    for (int i = 0; i < N; ++i) {
      operands[i].mean = call.Vector(Name("mean", i).c_str());
      operands[i].var = call.Vector(Name("var", i).c_str());
    }
    const auto affine = ReadAffine(call, attributes);
    for (int i = 0; i < N; ++i) {
      operands[i].affine = affine[i];
      operands[i].b = call.Vector(Name("b", i).c_str());
      operands[i].k = call.Vector(Name("k", i).c_str());
    }
    const auto dx = GradientResults(call);
    return Run(native, call, /*summed_inputs=*/0, [&](Backend& backend) {
      return backend.BackwardApply(call.problem(), buffers, operands, dx);
    });
  }

 private:
  static constexpr bool kTakesFloat32Outputs =
      Backend::kTakesFloat32Outputs && kHasEveryForm<N>;

  // What errors call an operand or result of one input.
  static std::string Name(const char* name, int input) {
    return N == 1 ? name : name + std::to_string(input + 1);
  }

  static FfiCall Call(Args args, Rets rets, size_t x, ShapeAttributes shape) {
    return FfiCall(args, rets, x, shape.has_groups, shape.has_inner,
                   Name("x", 0).c_str());
  }

  // That of an operation whose first result is y.
  static FfiCall ForwardCall(Args args, Rets rets, ShapeAttributes shape) {
    FfiCall call = Call(args, rets, /*x=*/0, shape);
    if (kTakesFloat32Outputs) call.AllowFloat32Y();
    return call;
  }

  // That of an operation whose first operand is dy.
  static FfiCall BackwardCall(Args args, Rets rets, ShapeAttributes shape) {
    FfiCall call = Call(args, rets, /*x=*/1, shape);
    if (kTakesFloat32Outputs) call.AllowFloat32Dy();
    return call;
  }

  // The rest of the buffers comes after other operands.
  static NormaliseBuffers<N> ReadNormalised(
      FfiCall& call, const NormaliseAttributes& attributes) {
    NormaliseBuffers<N> buffers{};
    buffers.x = ReadInputs(call);
    buffers.z = call.ArrayIf(attributes.has_z, Like::kY, "z");
    return buffers;
  }

  static GradientBuffers<N> ReadGradient(FfiCall& call,
                                         const GateAttributes& attributes) {
    GradientBuffers<N> buffers{};
    buffers.dy = call.Array(Like::kY, "dy");
    buffers.x = ReadInputs(call);
    buffers.gate =
        call.ParseGate(attributes.gate, /*may_be_z=*/kHasEveryForm<N>);
    buffers.activation = ReadActivation(call, attributes.activation);
    call.RequireGateOf(buffers.activation, buffers.gate);
    buffers.saved = call.Saved(buffers.gate);
    return buffers;
  }

  static Activation ReadActivation(FfiCall& call,
                                   const ActivationAttributes& attributes) {
    const Activation activation =
        call.ParseActivation(attributes.name, attributes.negative_slope);
    call.RequireReluUnlessLikeX(activation);
    return activation;
  }

  static PerInput<const void*, N> ReadInputs(FfiCall& call) {
    return PerInputOf<N>(
        [&](int i) { return call.Array(Like::kX, Name("x", i).c_str()); });
  }

  static PerInput<AffineOperands, N> ReadAffine(FfiCall& call,
                                                const Affine& attributes) {
    return PerInputOf<N>([&](int i) {
      AffineOperands affine{};
      affine.scale =
          call.VectorIf(attributes.has_scale[i], Name("scale", i).c_str());
      affine.bias =
          call.VectorIf(attributes.has_bias[i], Name("bias", i).c_str());
      affine.epsilon = call.CheckEpsilon(attributes.epsilon);
      return affine;
    });
  }

  static PerInput<void*, N> GradientResults(FfiCall& call) {
    return PerInputOf<N>([&](int i) {
      return call.ArrayResult(Like::kX, Name("dx", i).c_str());
    });
  }

  static PerInput<void*, N> VectorResults(FfiCall& call, const char* name) {
    return PerInputOf<N>(
        [&](int i) { return call.VectorResult(Name(name, i).c_str()); });
  }

  // `summed_inputs` is for how many inputs the operation has sums in a
  // workspace.
  template <typename F>
  static Error Run(Native native, FfiCall& call, int summed_inputs, F f) {
    Backend backend(native);
    if (!Backend::kTakesMaskChannels) call.RequireMaskInOrder();
    if (summed_inputs > 0) backend.ReadWorkspace(call, summed_inputs);
    Error error = call.Finish();
    if (error.failure()) return error;
    return f(backend);
  }
};

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_FFI_OPERATIONS_H_
