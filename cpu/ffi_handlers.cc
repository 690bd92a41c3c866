#include "cpu/ffi_handlers.h"

#include <exception>
#include <functional>
#include <string_view>
#include <utility>

#include "cpu/executor.h"
#include "cpu/ffi_call.h"
#include "cpu/operations.h"

namespace jax_bnar {
namespace {

namespace ffi = xla::ffi;

class XlaThreadPool : public ThreadPool {
 public:
  explicit XlaThreadPool(ffi::ThreadPool& pool) : pool_(pool) {}

  int64_t num_threads() const override { return pool_.num_threads(); }
  void Schedule(std::function<void()> closure) override {
    pool_.Schedule(std::move(closure));
  }

 private:
  ffi::ThreadPool& pool_;
};

// Checks the call, then runs f(pool); no exception leaves a handler.
template <typename F>
ffi::Error RunChecked(FfiCall& call, ffi::ThreadPool& pool, F f) {
  ffi::Error error = call.Finish();
  if (error.failure()) return error;
  try {
    XlaThreadPool threads(pool);
    f(threads);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "jax_bnar: no memory for the sums of the channels");
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string("jax_bnar: ") + e.what());
  }
  return ffi::Error::Success();
}

ffi::Error ForwardImpl(ffi::ThreadPool pool, ffi::RemainingArgs args,
                       ffi::RemainingRets rets, bool has_groups, bool has_inner,
                       bool has_z, bool has_scale, bool has_bias,
                       double epsilon, std::string_view activation,
                       bool save_mask) {
  FfiCall call(args, rets, /*x=*/0, has_groups, has_inner);
  NormaliseBuffers buffers{};
  buffers.x = call.Array("x");
  buffers.z = call.ArrayIf(has_z, "z");
  AffineOperands affine{};
  affine.scale = call.VectorIf(has_scale, "scale");
  affine.bias = call.VectorIf(has_bias, "bias");
  affine.epsilon = call.CheckEpsilon(epsilon);
  buffers.relu = call.ParseRelu(activation);
  buffers.y = call.ArrayResult("y");
  void* mean = call.VectorResult("mean");
  void* var = call.VectorResult("var");
  buffers.mask = call.MaskResultIf(save_mask, "mask");
  return RunChecked(call, pool, [&](ThreadPool& threads) {
    Forward(threads, call.problem(), buffers, affine, mean, var);
  });
}

ffi::Error NormaliseImpl(ffi::ThreadPool pool, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, bool has_groups,
                         bool has_inner, bool has_z, bool has_scale,
                         bool has_bias, double epsilon,
                         std::string_view activation, bool save_mask) {
  FfiCall call(args, rets, /*x=*/0, has_groups, has_inner);
  NormaliseBuffers buffers{};
  buffers.x = call.Array("x");
  buffers.z = call.ArrayIf(has_z, "z");
  AffineOperands affine{};
  affine.scale = call.VectorIf(has_scale, "scale");
  affine.bias = call.VectorIf(has_bias, "bias");
  affine.epsilon = call.CheckEpsilon(epsilon);
  const VectorOperand mean = call.Vector("mean");
  const VectorOperand var = call.Vector("var");
  buffers.relu = call.ParseRelu(activation);
  buffers.y = call.ArrayResult("y");
  buffers.mask = call.MaskResultIf(save_mask, "mask");
  return RunChecked(call, pool, [&](ThreadPool& threads) {
    NormaliseWith(threads, call.problem(), buffers, affine, mean, var);
  });
}

ffi::Error StatisticsImpl(ffi::ThreadPool pool, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, bool has_groups,
                          bool has_inner) {
  FfiCall call(args, rets, /*x=*/0, has_groups, has_inner);
  const void* x = call.Array("x");
  void* mean = call.VectorResult("mean");
  void* var = call.VectorResult("var");
  return RunChecked(call, pool, [&](ThreadPool& threads) {
    Statistics(threads, call.problem(), x, mean, var);
  });
}

GradientBuffers ReadGradientBuffers(FfiCall& call, std::string_view gate) {
  GradientBuffers buffers{};
  buffers.dy = call.Array("dy");
  buffers.x = call.Array("x");
  buffers.gate = call.ParseGate(gate);
  buffers.evidence = call.Evidence(buffers.gate);
  return buffers;
}

ffi::Error BackwardImpl(ffi::ThreadPool pool, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, bool has_groups,
                        bool has_inner, bool has_scale, bool has_bias,
                        double epsilon, std::string_view gate,
                        bool has_residual) {
  FfiCall call(args, rets, /*x=*/1, has_groups, has_inner);
  const GradientBuffers buffers = ReadGradientBuffers(call, gate);
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
  void* dz = call.ArrayResultIf(has_residual, "dz");
  return RunChecked(call, pool, [&](ThreadPool& threads) {
    Backward(threads, call.problem(), buffers, operands, dx, dscale, dbias, dz);
  });
}

ffi::Error BackwardReduceImpl(ffi::ThreadPool pool, ffi::RemainingArgs args,
                              ffi::RemainingRets rets, bool has_groups,
                              bool has_inner, bool has_bias,
                              std::string_view gate, bool has_residual) {
  FfiCall call(args, rets, /*x=*/1, has_groups, has_inner);
  const GradientBuffers buffers = ReadGradientBuffers(call, gate);
  ReduceOperands operands{};
  operands.mean = call.Vector("mean");
  operands.a = call.VectorIf(buffers.gate == Gate::kX, "a");
  operands.bias = call.VectorIf(has_bias, "bias");
  void* sum_e = call.VectorResult("sum_e");
  void* sum_e_centred = call.VectorResult("sum_e_centred");
  void* dz = call.ArrayResultIf(has_residual, "dz");
  return RunChecked(call, pool, [&](ThreadPool& threads) {
    BackwardReduce(threads, call.problem(), buffers, operands, sum_e,
                   sum_e_centred, dz);
  });
}

ffi::Error BackwardApplyImpl(ffi::ThreadPool pool, ffi::RemainingArgs args,
                             ffi::RemainingRets rets, bool has_groups,
                             bool has_inner, bool has_bias,
                             std::string_view gate) {
  FfiCall call(args, rets, /*x=*/1, has_groups, has_inner);
  const GradientBuffers buffers = ReadGradientBuffers(call, gate);
  ApplyOperands operands{};
  operands.mean = call.Vector("mean");
  operands.a = call.Vector("a");
  operands.b = call.Vector("b");
  operands.k = call.Vector("k");
  operands.bias = call.VectorIf(has_bias, "bias");
  void* dx = call.ArrayResult("dx");
  return RunChecked(call, pool, [&](ThreadPool& threads) {
    BackwardApply(threads, call.problem(), buffers, operands, dx);
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(ForwardCpu, ForwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("has_groups")
                                  .Attr<bool>("has_inner")
                                  .Attr<bool>("has_z")
                                  .Attr<bool>("has_scale")
                                  .Attr<bool>("has_bias")
                                  .Attr<double>("epsilon")
                                  .Attr<std::string_view>("activation")
                                  .Attr<bool>("save_mask"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(NormaliseCpu, NormaliseImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("has_groups")
                                  .Attr<bool>("has_inner")
                                  .Attr<bool>("has_z")
                                  .Attr<bool>("has_scale")
                                  .Attr<bool>("has_bias")
                                  .Attr<double>("epsilon")
                                  .Attr<std::string_view>("activation")
                                  .Attr<bool>("save_mask"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(StatisticsCpu, StatisticsImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("has_groups")
                                  .Attr<bool>("has_inner"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(BackwardCpu, BackwardImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("has_groups")
                                  .Attr<bool>("has_inner")
                                  .Attr<bool>("has_scale")
                                  .Attr<bool>("has_bias")
                                  .Attr<double>("epsilon")
                                  .Attr<std::string_view>("gate")
                                  .Attr<bool>("has_residual"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(BackwardReduceCpu, BackwardReduceImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("has_groups")
                                  .Attr<bool>("has_inner")
                                  .Attr<bool>("has_bias")
                                  .Attr<std::string_view>("gate")
                                  .Attr<bool>("has_residual"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(BackwardApplyCpu, BackwardApplyImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<bool>("has_groups")
                                  .Attr<bool>("has_inner")
                                  .Attr<bool>("has_bias")
                                  .Attr<std::string_view>("gate"));

}  // namespace jax_bnar
