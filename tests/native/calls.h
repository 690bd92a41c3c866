// Calls of the six operations on the inputs of a case. Each allocates its
// results.

#ifndef JAX_BNAR_TESTS_NATIVE_CALLS_H_
#define JAX_BNAR_TESTS_NATIVE_CALLS_H_

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
  std::unique_ptr<Array> y, dx, dz;
  std::unique_ptr<ExactMemory> mask;
  // (G, C).
  std::unique_ptr<Array> mean, var, first, second;

  std::vector<std::vector<uint8_t>> Bytes() const {
    std::vector<std::vector<uint8_t>> all;
    for (const auto* array : {&y, &dx, &dz, &mean, &var, &first, &second}) {
      if (*array != nullptr) all.push_back((*array)->memory().Copy());
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

inline AffineOperands Affine(const Inputs& in, bool present) {
  if (!present) return {{}, {}, Inputs::kEpsilon};
  return {in.Operand(in.scale), in.Operand(in.bias), Inputs::kEpsilon};
}

inline NormaliseBuffers NewNormaliseBuffers(const Inputs& in,
                                            const NormaliseOptions& options,
                                            Results* results) {
  results->y = NewArray(in.c);
  if (options.mask) {
    results->mask =
        std::make_unique<ExactMemory>(in.c.mask_bytes(), in.c.result_lead);
  }
  return {in.x.data(), options.residual ? in.z.data() : nullptr,
          results->y->data(), options.mask ? results->mask->data() : nullptr,
          options.relu};
}

inline Results CallStatistics(Platform& platform, const Inputs& in) {
  Results r;
  r.mean = NewVector(in.c);
  r.var = NewVector(in.c);
  platform.Statistics(in.c.problem(), in.x.data(), r.mean->data(),
                      r.var->data());
  return r;
}

inline Results CallNormalise(Platform& platform, const Inputs& in,
                             const NormaliseOptions& options) {
  Results r;
  platform.Normalise(in.c.problem(), NewNormaliseBuffers(in, options, &r),
                     Affine(in, options.affine), in.Operand(in.mean),
                     in.Operand(in.var));
  return r;
}

inline Results CallForward(Platform& platform, const Inputs& in,
                           const NormaliseOptions& options) {
  Results r;
  r.mean = NewVector(in.c);
  r.var = NewVector(in.c);
  platform.Forward(in.c.problem(), NewNormaliseBuffers(in, options, &r),
                   Affine(in, options.affine), r.mean->data(), r.var->data());
  return r;
}

inline GradientBuffers Gradient(const Inputs& in, Gate gate) {
  const void* saved = nullptr;
  if (gate == Gate::kY) saved = in.y.data();
  if (gate == Gate::kMask) saved = in.mask.data();
  return {in.dy.data(), in.x.data(), saved, gate};
}

// first = sum_e, second = sum_e_centred.
inline Results CallReduce(Platform& platform, const Inputs& in, Gate gate,
                          bool residual) {
  Results r;
  r.first = NewVector(in.c);
  r.second = NewVector(in.c);
  if (residual) r.dz = NewArray(in.c);
  // Without kX these are absent, because nothing may depend on them.
  const bool from_x = gate == Gate::kX;
  platform.BackwardReduce(
      in.c.problem(), Gradient(in, gate),
      {in.Operand(in.mean), from_x ? in.Operand(in.a) : VectorOperand{},
       from_x ? in.Operand(in.bias) : VectorOperand{}},
      r.first->data(), r.second->data(), residual ? r.dz->data() : nullptr);
  return r;
}

inline Results CallApply(Platform& platform, const Inputs& in, Gate gate) {
  Results r;
  r.dx = NewArray(in.c);
  platform.BackwardApply(
      in.c.problem(), Gradient(in, gate),
      {in.Operand(in.mean), in.Operand(in.a), in.Operand(in.b),
       in.Operand(in.k),
       gate == Gate::kX ? in.Operand(in.bias) : VectorOperand{}},
      r.dx->data());
  return r;
}

// first = dbias, second = dscale.
inline Results CallBackward(Platform& platform, const Inputs& in, Gate gate,
                            bool residual, bool statistics_cotangents) {
  Results r;
  r.first = NewVector(in.c);
  r.second = NewVector(in.c);
  r.dx = NewArray(in.c);
  if (residual) r.dz = NewArray(in.c);
  const auto cotangent = [&](const Array& vector) {
    return statistics_cotangents ? in.Operand(vector) : VectorOperand{};
  };
  platform.Backward(
      in.c.problem(), Gradient(in, gate),
      {in.Operand(in.mean), in.Operand(in.var), in.Operand(in.scale),
       gate == Gate::kX ? in.Operand(in.bias) : VectorOperand{},
       cotangent(in.dmean), cotangent(in.dvar), Inputs::kEpsilon},
      r.dx->data(), r.second->data(), r.first->data(),
      residual ? r.dz->data() : nullptr);
  return r;
}

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_CALLS_H_
