// Calls of the operations on the inputs of a case, which may be one or two.
// Each allocates its results.

#ifndef JAX_BNAR_TESTS_NATIVE_CALLS_H_
#define JAX_BNAR_TESTS_NATIVE_CALLS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <type_traits>
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

inline std::unique_ptr<Array> NewArray(const Case& c, DType dtype) {
  return std::make_unique<Array>(dtype, c.size(), c.result_lead);
}

inline std::unique_ptr<Array> NewVector(const Case& c) {
  return std::make_unique<Array>(
      AccumulatorOf(c.dtype), c.shape.groups * c.shape.channels, c.result_lead);
}

struct NormaliseOptions {
  bool activation;
  bool residual;
  bool mask;
  bool affine;  // with scale and bias
};

inline AffineOperands Affine(const Input& in, bool present) {
  if (!present) return {{}, {}, Input::kEpsilon};
  return {in.Operand(in.scale), in.Operand(in.bias), Input::kEpsilon};
}

// Calls f with the number of inputs as a constant.
template <typename F>
void WithInputCount(const Inputs& in, F f) {
  in.count() == 1 ? f(std::integral_constant<int, 1>())
                  : f(std::integral_constant<int, 2>());
}

template <int N>
PerInput<const void*, N> ArraysX(const Inputs& in) {
  return PerInputOf<N>([&](int i) -> const void* { return in[i].x.data(); });
}

// The data of one kind of result, of each input.
template <int N>
PerInput<void*, N> DataOf(const Results& results,
                          std::unique_ptr<Array> Results::OfInput::* member) {
  return PerInputOf<N>(
      [&](int i) -> void* { return (results.of[i].*member)->data(); });
}

inline void* DataOrNull(const std::unique_ptr<Array>& array) {
  return array == nullptr ? nullptr : array->data();
}

inline uint8_t* NewMask(const Case& c, bool present, Results* results) {
  if (!present) return nullptr;
  results->mask = std::make_unique<ExactMemory>(c.mask_bytes(), c.result_lead);
  return results->mask->data();
}

// The gate alone needs the bias.
inline AffineOperands AffineOfApply(const Input& in, Gate gate) {
  AffineOperands affine = Affine(in, true);
  if (!Recomputes(gate)) affine.bias = VectorOperand{};
  return affine;
}

// Two inputs have no residual.
template <int N>
NormaliseBuffers<N> NewNormaliseBuffers(const Inputs& in,
                                        const NormaliseOptions& options,
                                        Results* results) {
  results->y = NewArray(in.c, in.c.out_dtype);
  return {ArraysX<N>(in), options.residual ? in.first().z.data() : nullptr,
          results->y->data(), NewMask(in.c, options.mask, results),
          options.activation ? in.c.activation : Activation{}};
}

template <int N>
PerInput<AffineOperands, N> AffineOfEach(const Inputs& in,
                                         const NormaliseOptions& options) {
  return PerInputOf<N>([&](int i) { return Affine(in[i], options.affine); });
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
  WithInputCount(in, [&](auto inputs) {
    constexpr int N = inputs.value;
    platform.Normalise(
        in.c.problem(), NewNormaliseBuffers<N>(in, options, &r),
        AffineOfEach<N>(in, options),
        PerInputOf<N>([&](int i) { return in[i].Operand(in[i].mean); }),
        PerInputOf<N>([&](int i) { return in[i].Operand(in[i].var); }));
  });
  return r;
}

inline Results CallForward(Platform& platform, const Inputs& in,
                           const NormaliseOptions& options) {
  Results r = NewStatistics(in);
  WithInputCount(in, [&](auto inputs) {
    constexpr int N = inputs.value;
    platform.Forward(in.c.problem(), NewNormaliseBuffers<N>(in, options, &r),
                     AffineOfEach<N>(in, options),
                     DataOf<N>(r, &Results::OfInput::mean),
                     DataOf<N>(r, &Results::OfInput::var));
  });
  return r;
}

template <int N>
GradientBuffers<N> Gradient(const Inputs& in, Gate gate) {
  const Input& first = in.first();
  const void* saved = nullptr;
  if (gate == Gate::kY) saved = first.y.data();
  if (gate == Gate::kMask) saved = first.mask.data();
  if (gate == Gate::kZ) saved = first.z.data();
  return {first.dy.data(), ArraysX<N>(in), saved, gate, in.c.activation};
}

// first = sum_e, second = sum_e_centred. Two inputs have no residual.
inline Results CallReduce(Platform& platform, const Inputs& in, Gate gate,
                          bool residual) {
  Results r;
  r.first = NewVector(in.c);
  for (int i = 0; i < in.count(); ++i) r.of[i].second = NewVector(in.c);
  if (residual && in.count() == 1) r.dz = NewArray(in.c, in.c.out_dtype);
  WithInputCount(in, [&](auto inputs) {
    constexpr int N = inputs.value;
    const auto operands = PerInputOf<N>([&](int i) {
      const Input& one = in[i];
      // Otherwise these are absent, because nothing may depend on them.
      const bool recomputes = Recomputes(gate);
      return ReduceOperands{one.Operand(one.mean),
                            recomputes ? one.Operand(one.var) : VectorOperand{},
                            Affine(one, recomputes)};
    });
    platform.BackwardReduce(
        in.c.problem(), Gradient<N>(in, gate), operands, r.first->data(),
        DataOf<N>(r, &Results::OfInput::second), DataOrNull(r.dz));
  });
  return r;
}

inline Results CallApply(Platform& platform, const Inputs& in, Gate gate) {
  Results r;
  for (int i = 0; i < in.count(); ++i) r.of[i].dx = NewArray(in.c, in.c.dtype);
  WithInputCount(in, [&](auto inputs) {
    constexpr int N = inputs.value;
    const auto operands = PerInputOf<N>([&](int i) {
      const Input& one = in[i];
      return ApplyOperands{one.Operand(one.mean), one.Operand(one.var),
                           AffineOfApply(one, gate), one.Operand(one.b),
                           one.Operand(one.k)};
    });
    platform.BackwardApply(in.c.problem(), Gradient<N>(in, gate), operands,
                           DataOf<N>(r, &Results::OfInput::dx));
  });
  return r;
}

// first = dbias, second = dscale. Two inputs have no residual.
inline Results CallBackward(Platform& platform, const Inputs& in, Gate gate,
                            bool residual, bool statistics_cotangents) {
  Results r;
  r.first = NewVector(in.c);
  for (int i = 0; i < in.count(); ++i) {
    r.of[i].second = NewVector(in.c);
    r.of[i].dx = NewArray(in.c, in.c.dtype);
  }
  if (residual && in.count() == 1) r.dz = NewArray(in.c, in.c.out_dtype);
  WithInputCount(in, [&](auto inputs) {
    constexpr int N = inputs.value;
    const auto operands = PerInputOf<N>([&](int i) {
      const Input& one = in[i];
      const auto cotangent = [&](const Array& vector) {
        return statistics_cotangents ? one.Operand(vector) : VectorOperand{};
      };
      return BackwardOperands{
          one.Operand(one.mean),
          one.Operand(one.var),
          one.Operand(one.scale),
          Recomputes(gate) ? one.Operand(one.bias) : VectorOperand{},
          cotangent(one.dmean),
          cotangent(one.dvar),
          Input::kEpsilon};
    });
    platform.Backward(in.c.problem(), Gradient<N>(in, gate), operands,
                      DataOf<N>(r, &Results::OfInput::dx),
                      DataOf<N>(r, &Results::OfInput::second), r.first->data(),
                      DataOrNull(r.dz));
  });
  return r;
}

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_CALLS_H_
