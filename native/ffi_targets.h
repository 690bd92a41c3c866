// The custom calls' attributes, which programs hold: their names and types, and
// what they say to the operations of native/ffi_operations.h. Calls for two
// inputs number the operands of each, and have no z.

#ifndef JAX_BNAR_NATIVE_FFI_TARGETS_H_
#define JAX_BNAR_NATIVE_FFI_TARGETS_H_

#include <string_view>
#include <utility>

#include "native/caught.h"
#include "native/ffi_operations.h"
#include "native/operations.h"
#include "xla/ffi/api/ffi.h"

namespace jax_bnar {

// For each target a handler, and a function that binds what this handler takes
// after the context, in order.
template <typename Backend>
class FfiTargets {
 public:
  using Error = xla::ffi::Error;
  using Native = typename Backend::Native;
  using Args = xla::ffi::RemainingArgs;
  using Rets = xla::ffi::RemainingRets;

  static Error Statistics(Native native, Args args, Rets rets, bool has_groups,
                          bool has_inner) {
    return One::Statistics(native, args, rets, {has_groups, has_inner});
  }

  // --- one input -------------------------------------------------------------

  static Error Forward(Native native, Args args, Rets rets, bool has_groups,
                       bool has_inner, bool has_z, bool has_scale,
                       bool has_bias, double epsilon,
                       std::string_view activation, double negative_slope,
                       bool save_mask) {
    return One::Forward(native, args, rets, {has_groups, has_inner},
                        {{has_scale}, {has_bias}, epsilon},
                        {has_z, {activation, negative_slope}, save_mask});
  }

  static Error Normalise(Native native, Args args, Rets rets, bool has_groups,
                         bool has_inner, bool has_z, bool has_scale,
                         bool has_bias, double epsilon,
                         std::string_view activation, double negative_slope,
                         bool save_mask) {
    return One::Normalise(native, args, rets, {has_groups, has_inner},
                          {{has_scale}, {has_bias}, epsilon},
                          {has_z, {activation, negative_slope}, save_mask});
  }

  static Error Backward(Native native, Args args, Rets rets, bool has_groups,
                        bool has_inner, bool has_scale, bool has_bias,
                        double epsilon, std::string_view activation,
                        double negative_slope, std::string_view gate,
                        bool has_z) {
    return One::Backward(native, args, rets, {has_groups, has_inner},
                         {{has_scale}, {has_bias}, epsilon},
                         {gate, {activation, negative_slope}}, has_z);
  }

  static Error BackwardReduce(Native native, Args args, Rets rets,
                              bool has_groups, bool has_inner, bool has_scale,
                              bool has_bias, double epsilon,
                              std::string_view activation,
                              double negative_slope, std::string_view gate,
                              bool has_z) {
    return One::BackwardReduce(native, args, rets, {has_groups, has_inner},
                               {{has_scale}, {has_bias}, epsilon},
                               {gate, {activation, negative_slope}}, has_z);
  }

  static Error BackwardApply(Native native, Args args, Rets rets,
                             bool has_groups, bool has_inner, bool has_scale,
                             bool has_bias, double epsilon,
                             std::string_view activation, double negative_slope,
                             std::string_view gate) {
    return One::BackwardApply(native, args, rets, {has_groups, has_inner},
                              {{has_scale}, {has_bias}, epsilon},
                              {gate, {activation, negative_slope}});
  }

  template <typename Binding>
  static auto BindStatistics(Binding&& binding) {
    return BindShape(std::move(binding));
  }

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
        .template Attr<double>("negative_slope")
        .template Attr<bool>("save_mask");
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
        .template Attr<std::string_view>("activation")
        .template Attr<double>("negative_slope")
        .template Attr<std::string_view>("gate");
  }

  // --- two inputs ------------------------------------------------------------

  static Error DualForward(Native native, Args args, Rets rets, bool has_groups,
                           bool has_inner, bool has_scale1, bool has_bias1,
                           bool has_scale2, bool has_bias2, double epsilon,
                           std::string_view activation, double negative_slope,
                           bool save_mask) {
    return Two::Forward(
        native, args, rets, {has_groups, has_inner},
        {{has_scale1, has_scale2}, {has_bias1, has_bias2}, epsilon},
        {/*has_z=*/false, {activation, negative_slope}, save_mask});
  }

  static Error DualNormalise(Native native, Args args, Rets rets,
                             bool has_groups, bool has_inner, bool has_scale1,
                             bool has_bias1, bool has_scale2, bool has_bias2,
                             double epsilon, std::string_view activation,
                             double negative_slope, bool save_mask) {
    return Two::Normalise(
        native, args, rets, {has_groups, has_inner},
        {{has_scale1, has_scale2}, {has_bias1, has_bias2}, epsilon},
        {/*has_z=*/false, {activation, negative_slope}, save_mask});
  }

  static Error DualBackward(Native native, Args args, Rets rets,
                            bool has_groups, bool has_inner, bool has_scale1,
                            bool has_bias1, bool has_scale2, bool has_bias2,
                            double epsilon, std::string_view activation,
                            double negative_slope, std::string_view gate) {
    return Two::Backward(
        native, args, rets, {has_groups, has_inner},
        {{has_scale1, has_scale2}, {has_bias1, has_bias2}, epsilon},
        {gate, {activation, negative_slope}}, /*has_z=*/false);
  }

  static Error DualBackwardReduce(Native native, Args args, Rets rets,
                                  bool has_groups, bool has_inner,
                                  bool has_scale1, bool has_bias1,
                                  bool has_scale2, bool has_bias2,
                                  double epsilon, std::string_view activation,
                                  double negative_slope,
                                  std::string_view gate) {
    return Two::BackwardReduce(
        native, args, rets, {has_groups, has_inner},
        {{has_scale1, has_scale2}, {has_bias1, has_bias2}, epsilon},
        {gate, {activation, negative_slope}}, /*has_z=*/false);
  }

  static Error DualBackwardApply(Native native, Args args, Rets rets,
                                 bool has_groups, bool has_inner,
                                 bool has_scale1, bool has_bias1,
                                 bool has_scale2, bool has_bias2,
                                 double epsilon, std::string_view activation,
                                 double negative_slope, std::string_view gate) {
    return Two::BackwardApply(
        native, args, rets, {has_groups, has_inner},
        {{has_scale1, has_scale2}, {has_bias1, has_bias2}, epsilon},
        {gate, {activation, negative_slope}});
  }

  template <typename Binding>
  static auto BindDualForward(Binding&& binding) {
    return BindDualNormalise(std::move(binding));
  }

  template <typename Binding>
  static auto BindDualNormalise(Binding&& binding) {
    return BindTwoAffine(std::move(binding)).template Attr<bool>("save_mask");
  }

  template <typename Binding>
  static auto BindDualBackward(Binding&& binding) {
    return BindTwoAffine(std::move(binding))
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
  using One = FfiOperations<Backend, 1>;
  using Two = FfiOperations<Backend, 2>;

  template <typename Binding>
  static auto BindShape(Binding&& binding) {
    return std::move(binding)
        .RemainingArgs()
        .RemainingRets()
        .template Attr<bool>("has_groups")
        .template Attr<bool>("has_inner");
  }

  template <typename Binding>
  static auto BindTwoAffine(Binding&& binding) {
    return BindShape(std::move(binding))
        .template Attr<bool>("has_scale1")
        .template Attr<bool>("has_bias1")
        .template Attr<bool>("has_scale2")
        .template Attr<bool>("has_bias2")
        .template Attr<double>("epsilon")
        .template Attr<std::string_view>("activation")
        .template Attr<double>("negative_slope");
  }
};

#define BNAR_DEFINE_HANDLER(name, python, suffix, Backend, context, ...) \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(                                         \
      name##suffix, Caught<FfiTargets<Backend>::name>::Call,             \
      FfiTargets<Backend>::Bind##name(context), ##__VA_ARGS__);

// Defines the handlers Forward<suffix>, DualForward<suffix> and so on. The
// argument after the backend is the binding of the context from which
// Backend::Native is decoded; the traits of the handlers may follow.
#define BNAR_DEFINE_HANDLERS(suffix, Backend, ...) \
  BNAR_FOR_EACH_TARGET(BNAR_DEFINE_HANDLER, suffix, Backend, __VA_ARGS__)

}  // namespace jax_bnar

#endif  // JAX_BNAR_NATIVE_FFI_TARGETS_H_
