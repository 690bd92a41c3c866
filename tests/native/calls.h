// Calls of the operations on the inputs of a case, which may be one or two.
// Each allocates its results.

#ifndef JAX_BNAR_TESTS_NATIVE_CALLS_H_
#define JAX_BNAR_TESTS_NATIVE_CALLS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "native/problem.h"
#include "tests/native/inputs.h"
#include "tests/native/platform.h"

namespace jax_bnar {
namespace testing {

// Results that a call did not ask for are null.
struct Results {
  // (G, C), but for dx.
  struct OfInput {
    std::unique_ptr<Array> mean, var, dx, second;
  };

  std::unique_ptr<Array> y, dz;
  std::unique_ptr<ExactMemory> mask;
  std::unique_ptr<Array> first;  // (G, C)
  std::array<OfInput, 2> of;

  std::vector<std::vector<uint8_t>> Bytes() const {
    std::vector<std::vector<uint8_t>> all;
    const auto add = [&all](const std::unique_ptr<Array>& array) {
      if (array != nullptr) all.push_back(array->memory().Copy());
    };
    for (const auto* array : {&y, &dz, &first}) add(*array);
    for (const OfInput& one : of) {
      for (const auto* array : {&one.mean, &one.var, &one.dx, &one.second}) {
        add(*array);
      }
    }
    if (mask != nullptr) all.push_back(mask->Copy());
    return all;
  }
};

inline std::unique_ptr<Array> NewArray(const Case& c) {
  return std::make_unique<Array>(c.dtype, c.size(), c.result_lead);
}

inline std::unique_ptr<Array> NewVector(const Case& c) {
  return std::make_unique<Array>(
      AccumulatorOf(c.dtype), c.shape.groups * c.shape.channels, c.result_lead);
}

struct NormaliseOptions {
  bool relu;
  bool residual;
  bool mask;
  bool affine;  // with scale and bias
};

inline AffineOperands Affine(const Input& in, bool present) {
  if (!present) return {{}, {}, Input::kEpsilon};
  return {in.Operand(in.scale), in.Operand(in.bias), Input::kEpsilon};
}

inline Both<const void*> BothX(const Inputs& in) {
  return {in[0].x.data(), in[1].x.data()};
}

inline uint8_t* NewMask(const Case& c, bool present, Results* results) {
  if (!present) return nullptr;
  results->mask = std::make_unique<ExactMemory>(c.mask_bytes(), c.result_lead);
  return results->mask->data();
}

// The gate alone needs the bias.
inline AffineOperands AffineOfApply(const Input& in, Gate gate) {
  AffineOperands affine = Affine(in, true);
  if (gate != Gate::kX) affine.bias = VectorOperand{};
  return affine;
}

inline NormaliseBuffers NewNormaliseBuffers(const Inputs& in,
                                            const NormaliseOptions& options,
                                            Results* results) {
  results->y = NewArray(in.c);
  const Input& first = in.first();
  return {first.x.data(), options.residual ? first.z.data() : nullptr,
          results->y->data(), NewMask(in.c, options.mask, results),
          options.relu};
}

// Two inputs have a ReLU and no residual.
inline DualNormaliseBuffers NewDualNormaliseBuffers(
    const Inputs& in, const NormaliseOptions& options, Results* results) {
  results->y = NewArray(in.c);
  return {BothX(in), results->y->data(), NewMask(in.c, options.mask, results)};
}

inline Results NewStatistics(const Inputs& in) {
  Results r;
  for (int i = 0; i < in.count(); ++i) {
    r.of[i].mean = NewVector(in.c);
    r.of[i].var = NewVector(in.c);
  }
  return r;
}

inline Results CallStatistics(Platform& platform, const Inputs& in) {
  Results r = NewStatistics(in);
  for (int i = 0; i < in.count(); ++i) {
    platform.Statistics(in.c.problem(), in[i].x.data(), r.of[i].mean->data(),
                        r.of[i].var->data());
  }
  return r;
}

inline Results CallNormalise(Platform& platform, const Inputs& in,
                             const NormaliseOptions& options) {
  Results r;
  const Input& first = in.first();
  if (in.count() == 1) {
    platform.Normalise(in.c.problem(), NewNormaliseBuffers(in, options, &r),
                       Affine(first, options.affine), first.Operand(first.mean),
                       first.Operand(first.var));
  } else {
    platform.DualNormalise(
        in.c.problem(), NewDualNormaliseBuffers(in, options, &r),
        {Affine(in[0], options.affine), Affine(in[1], options.affine)},
        {in[0].Operand(in[0].mean), in[1].Operand(in[1].mean)},
        {in[0].Operand(in[0].var), in[1].Operand(in[1].var)});
  }
  return r;
}

inline Results CallForward(Platform& platform, const Inputs& in,
                           const NormaliseOptions& options) {
  Results r = NewStatistics(in);
  if (in.count() == 1) {
    platform.Forward(in.c.problem(), NewNormaliseBuffers(in, options, &r),
                     Affine(in[0], options.affine), r.of[0].mean->data(),
                     r.of[0].var->data());
  } else {
    platform.DualForward(
        in.c.problem(), NewDualNormaliseBuffers(in, options, &r),
        {Affine(in[0], options.affine), Affine(in[1], options.affine)},
        {r.of[0].mean->data(), r.of[1].mean->data()},
        {r.of[0].var->data(), r.of[1].var->data()});
  }
  return r;
}

inline GradientBuffers Gradient(const Inputs& in, Gate gate) {
  const Input& first = in.first();
  const void* saved = nullptr;
  if (gate == Gate::kY) saved = first.y.data();
  if (gate == Gate::kMask) saved = first.mask.data();
  return {first.dy.data(), first.x.data(), saved, gate};
}

inline DualGradientBuffers DualGradient(const Inputs& in, Gate gate) {
  const GradientBuffers one = Gradient(in, gate);
  return {one.dy, BothX(in), one.saved, gate};
}

// first = sum_e, second = sum_e_centred. Two inputs have no residual.
inline Results CallReduce(Platform& platform, const Inputs& in, Gate gate,
                          bool residual) {
  Results r;
  r.first = NewVector(in.c);
  const bool from_x = gate == Gate::kX;
  Both<ReduceOperands> operands;
  for (int i = 0; i < in.count(); ++i) {
    const Input& one = in[i];
    r.of[i].second = NewVector(in.c);
    // Without kX these are absent, because nothing may depend on them.
    operands[i] = {one.Operand(one.mean),
                   from_x ? one.Operand(one.var) : VectorOperand{},
                   Affine(one, from_x)};
  }
  if (in.count() == 1) {
    if (residual) r.dz = NewArray(in.c);
    platform.BackwardReduce(in.c.problem(), Gradient(in, gate), operands[0],
                            r.first->data(), r.of[0].second->data(),
                            residual ? r.dz->data() : nullptr);
  } else {
    platform.DualBackwardReduce(
        in.c.problem(), DualGradient(in, gate), operands, r.first->data(),
        {r.of[0].second->data(), r.of[1].second->data()});
  }
  return r;
}

inline Results CallApply(Platform& platform, const Inputs& in, Gate gate) {
  Results r;
  Both<ApplyOperands> operands;
  for (int i = 0; i < in.count(); ++i) {
    const Input& one = in[i];
    r.of[i].dx = NewArray(in.c);
    operands[i] = {one.Operand(one.mean), one.Operand(one.var),
                   AffineOfApply(one, gate), one.Operand(one.b),
                   one.Operand(one.k)};
  }
  if (in.count() == 1) {
    platform.BackwardApply(in.c.problem(), Gradient(in, gate), operands[0],
                           r.of[0].dx->data());
  } else {
    platform.DualBackwardApply(in.c.problem(), DualGradient(in, gate), operands,
                               {r.of[0].dx->data(), r.of[1].dx->data()});
  }
  return r;
}

// first = dbias, second = dscale. Two inputs have no residual.
inline Results CallBackward(Platform& platform, const Inputs& in, Gate gate,
                            bool residual, bool statistics_cotangents) {
  Results r;
  r.first = NewVector(in.c);
  Both<BackwardOperands> operands;
  for (int i = 0; i < in.count(); ++i) {
    const Input& one = in[i];
    r.of[i].second = NewVector(in.c);
    r.of[i].dx = NewArray(in.c);
    const auto cotangent = [&](const Array& vector) {
      return statistics_cotangents ? one.Operand(vector) : VectorOperand{};
    };
    operands[i] = {one.Operand(one.mean),
                   one.Operand(one.var),
                   one.Operand(one.scale),
                   gate == Gate::kX ? one.Operand(one.bias) : VectorOperand{},
                   cotangent(one.dmean),
                   cotangent(one.dvar),
                   Input::kEpsilon};
  }
  if (in.count() == 1) {
    if (residual) r.dz = NewArray(in.c);
    platform.Backward(in.c.problem(), Gradient(in, gate), operands[0],
                      r.of[0].dx->data(), r.of[0].second->data(),
                      r.first->data(), residual ? r.dz->data() : nullptr);
  } else {
    platform.DualBackward(in.c.problem(), DualGradient(in, gate), operands,
                          {r.of[0].dx->data(), r.of[1].dx->data()},
                          {r.of[0].second->data(), r.of[1].second->data()},
                          r.first->data());
  }
  return r;
}

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_CALLS_H_
