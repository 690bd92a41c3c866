// Tests the activations other than ReLU: the accuracy of their functions, that
// these give the same bits with every instruction set, and the kernels with
// them, against plain loops in double.

#include "cpu/isa/curves.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/operations.h"
#include "tests/native/array.h"
#include "tests/native/check.h"
#include "tests/native/pools.h"

namespace jax_bnar {
namespace cpu {

#define BNAR_DECLARE_CURVES(isa)                                      \
  namespace isa {                                                     \
  template <typename T>                                               \
  void Activate(const Activation& activation,                         \
                BNAR_ISA::Accumulator<T>* values, int64_t size);      \
  template <typename T>                                               \
  void Differentiate(const Activation& activation,                    \
                     BNAR_ISA::Accumulator<T>* values, int64_t size); \
  }
BNAR_DECLARE_CURVES(baseline)
#if defined(__x86_64__)
BNAR_DECLARE_CURVES(avx2)
BNAR_DECLARE_CURVES(avx512)
BNAR_DECLARE_CURVES(avx512bf16)
#elif defined(__aarch64__)
BNAR_DECLARE_CURVES(neonbf16)
#endif

}  // namespace cpu

namespace testing {
namespace {

constexpr double kEpsilon = 1e-3;
constexpr double kSlope = 0.125;

const Activation kCurves[] = {{ActivationKind::kRelu6, 0},
                              {ActivationKind::kLeakyRelu, kSlope},
                              {ActivationKind::kSilu, 0},
                              {ActivationKind::kHardSilu, 0}};

// What computes with elements of type T.
template <typename T>
using Accumulator = cpu::BNAR_ISA::Accumulator<T>;
using cpu::Float16;

template <typename T>
using Function = void (*)(const Activation&, Accumulator<T>*, int64_t);

template <typename T>
struct Functions {
  Function<T> activate;
  Function<T> differentiate;
};

// Those that the kernels call.
template <typename T>
Functions<T> FunctionsOfIsa() {
  const std::string name = cpu::IsaName();
#if defined(__x86_64__)
  if (name == "avx2") {
    return {cpu::avx2::Activate<T>, cpu::avx2::Differentiate<T>};
  }
  if (name == "avx512") {
    return {cpu::avx512::Activate<T>, cpu::avx512::Differentiate<T>};
  }
  if (name == "avx512bf16") {
    return {cpu::avx512bf16::Activate<T>, cpu::avx512bf16::Differentiate<T>};
  }
#elif defined(__aarch64__)
  if (name == "neonbf16") {
    return {cpu::neonbf16::Activate<T>, cpu::neonbf16::Differentiate<T>};
  }
#endif
  return {cpu::baseline::Activate<T>, cpu::baseline::Differentiate<T>};
}

// How many times the rounding errors of the accumulation type those of the
// functions may be: where results are rounded to 16 bits, a 32nd of the error
// of that.
template <typename T>
constexpr int kErrors = sizeof(T) == 2 ? 1 << 7 : 1;
template <typename T>
constexpr const char* kName = sizeof(T) == 2   ? "16 bits"
                              : sizeof(T) == 4 ? "float"
                                               : "double";

// act(u) and its derivative, where u has type A.
struct Expected {
  long double value;
  long double derivative;
};

template <typename A>
Expected ExpectedOf(const Activation& activation, A at) {
  const long double u = at;
  const auto relu6 = [](long double v) {
    return std::min(std::max(v, 0.0L), 6.0L);
  };
  const auto open = [](long double v) { return v > 0 && v < 6 ? 1.0L : 0.0L; };
  switch (activation.kind) {
    case ActivationKind::kRelu6:
      return {relu6(u), open(u)};
    case ActivationKind::kLeakyRelu:
      // A negative 0 is a negative number that was rounded.
      return std::signbit(at) ? Expected{u * activation.negative_slope,
                                         activation.negative_slope}
                              : Expected{u, 1};
    case ActivationKind::kSilu: {
      const long double sigmoid = 1 / (1 + std::exp(-u));
      return {u * sigmoid, sigmoid * (1 + u * (1 - sigmoid))};
    }
    default: {
      // The derivative jumps where this sum, as rounded, is 0 or 6.
      const long double shifted = at + A{3};
      return {u * relu6(shifted) / 6,
              relu6(shifted) / 6 + u * open(shifted) / 6};
    }
  }
}

// --- e^x ---------------------------------------------------------------------

template <typename A>
long double UlpOf(long double x) {
  const A rounded = static_cast<A>(std::fabs(x));
  return static_cast<long double>(
             std::nextafter(rounded, std::numeric_limits<A>::infinity())) -
         rounded;
}

template <typename T>
Accumulator<T> Exp(Accumulator<T> x) {
  namespace isa = cpu::BNAR_ISA;
  using Parts = isa::Parts<T, 1>;
  Parts u;
  u.part[0] = typename Parts::Float{} - x;
  const Parts e = isa::ExpOfNegated(u);
  Accumulator<T> lane;
  std::memcpy(&lane, &e, sizeof(lane));
  return lane;
}

// Steps through the numbers from `first` on whose e^x is a normal number, and
// is below half of the first power of 2 that is infinite.
template <typename T, typename Bits>
void TestExp(Bits first, Bits step) {
  using A = Accumulator<T>;
  context = std::string("e^x in ") + kName<T>;
  long double largest = 0;
  for (Bits bits = first;; bits += step) {
    A x;
    std::memcpy(&x, &bits, sizeof(x));
    const long double expected = std::exp(static_cast<long double>(x));
    if (expected < std::numeric_limits<A>::min()) break;
    if (expected > std::numeric_limits<A>::max() / std::sqrt(2.0L)) break;
    largest =
        std::max(largest, std::fabs(Exp<T>(x) - expected) / UlpOf<A>(expected));
  }
  std::printf("%s: at most %.3Lf ulp\n", context.c_str(), largest);
  BNAR_CHECK(largest < kErrors<T>,
             std::to_string(static_cast<double>(largest)));
  BNAR_CHECK(largest > 0.5, "no number was tried");
}

template <typename T>
void TestEndsOfExp() {
  context = std::string("the ends of e^x in ") + kName<T>;
  using A = Accumulator<T>;
  using Limits = std::numeric_limits<A>;
  const A infinity = Limits::infinity();
  const A largest = std::log(Limits::max());
  BNAR_CHECK(Exp<T>(0) == 1, "1");
  BNAR_CHECK(Exp<T>(-infinity) == 0 && Exp<T>(-largest - 2) == 0, "0");
  BNAR_CHECK(Exp<T>(infinity) == infinity && Exp<T>(largest + 2) == infinity,
             "infinity");
  BNAR_CHECK(std::isnan(Exp<T>(A(NAN))), "NaN");
}

// --- functions ---------------------------------------------------------------

template <typename A>
std::vector<A> Probes() {
  std::vector<A> probes = {0, static_cast<A>(-0.0)};
  for (const double end :
       {1e-30, 1e-3, 1.0, 3.0, 6.0, 20.0, 87.0, 95.0, 1e4, 1e30}) {
    for (int i = -40; i <= 40; ++i) {
      const double factor = 1 + i * (std::fabs(i) < 20 ? 1e-7 : 0.02);
      probes.push_back(static_cast<A>(end * factor));
      probes.push_back(static_cast<A>(-end * factor));
    }
  }
  probes.push_back(static_cast<A>(NAN));
  probes.resize((probes.size() + 15) / 16 * 16);
  return probes;
}

template <typename T>
void TestFunctions() {
  using A = Accumulator<T>;
  const std::vector<A> probes = Probes<A>();
  const int64_t size = static_cast<int64_t>(probes.size());
  const Functions<T> own = FunctionsOfIsa<T>();
  const Functions<T> baseline = {cpu::baseline::Activate<T>,
                                 cpu::baseline::Differentiate<T>};
  for (const Activation& activation : kCurves) {
    context = "function " + std::to_string(static_cast<int>(activation.kind)) +
              " in " + kName<T>;
    std::vector<A> values = probes, derivatives = probes;
    own.activate(activation, values.data(), size);
    own.differentiate(activation, derivatives.data(), size);
    std::vector<A> same_values = probes, same_derivatives = probes;
    baseline.activate(activation, same_values.data(), size);
    baseline.differentiate(activation, same_derivatives.data(), size);
    for (size_t i = 0; i < probes.size(); ++i) {
      const std::string at = " at " + std::to_string(probes[i]);
      if (std::isnan(probes[i])) {
        BNAR_CHECK(std::isnan(values[i]), "NaN is lost");
        continue;
      }
      BNAR_CHECK(std::memcmp(&values[i], &same_values[i], sizeof(A)) == 0 &&
                     std::memcmp(&derivatives[i], &same_derivatives[i],
                                 sizeof(A)) == 0,
                 "other bits than baseline's" + at);
      const Expected expected = ExpectedOf(activation, probes[i]);
      // Below the smallest normal number, e^x is 0.
      const long double least = 2 *
                                std::fabs(static_cast<long double>(probes[i])) *
                                std::numeric_limits<A>::min();
      const long double ulp =
          std::max(UlpOf<A>(expected.value),
                   static_cast<long double>(std::numeric_limits<A>::min()));
      BNAR_CHECK(
          std::fabs(values[i] - expected.value) <= 4 * kErrors<T> * ulp + least,
          std::to_string(values[i]) + at);
      const long double epsilon = std::numeric_limits<A>::epsilon();
      BNAR_CHECK(std::fabs(derivatives[i] - expected.derivative) <=
                     4 * kErrors<T> * epsilon + least,
                 std::to_string(derivatives[i]) + at);
    }
  }
}

// --- kernels -----------------------------------------------------------------

struct Test {
  Problem problem;
  Activation activation;
  Gate gate;
  bool residual;
};

using Numbers = std::vector<double>;

// Numbers in [-range, range) that differ from seed to seed, as stored.
std::unique_ptr<Array> NewNumbers(DType dtype, int64_t count, uint32_t seed,
                                  double range) {
  auto array = std::make_unique<Array>(dtype, count, /*lead=*/0);
  uint32_t state = 2654435769u * (seed + 1);
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    array->Set(i, range * (static_cast<double>(state >> 8) / (1 << 23) - 1));
  }
  return array;
}

void CheckNear(const char* name, const Array& found, const Numbers& expected,
               double tolerance) {
  for (int64_t i = 0; i < found.size(); ++i) {
    const double value = expected[static_cast<size_t>(i)];
    BNAR_CHECK(
        std::fabs(found[i] - value) <= tolerance * (1 + std::fabs(value)),
        std::string(name) + "[" + std::to_string(i) + "] is " +
            std::to_string(found[i]) + ", not " + std::to_string(value));
  }
}

void TestKernels(const Test& test) {
  const Shape& shape = test.problem.shape;
  const DType dtype = test.problem.dtype;
  const DType wide =
      dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const int64_t size = shape.size(), channels = shape.channels;
  const double tolerance = dtype == DType::kFloat64   ? 1e-11
                           : dtype == DType::kFloat32 ? 2e-4
                           : dtype == DType::kFloat16 ? 1e-2
                                                      : 8e-2;
  const auto channel_of = [&](int64_t i) { return i / shape.inner % channels; };
  const auto vector = [&](uint32_t seed, double range) {
    return NewNumbers(wide, channels, seed, range);
  };
  const auto x = NewNumbers(dtype, size, 1, 4);
  const auto z = NewNumbers(dtype, size, 2, 4);
  const auto dy = NewNumbers(dtype, size, 3, 1);
  const auto scale = vector(4, 3), bias = vector(5, 2);
  const auto mean = vector(6, 0), var = vector(7, 0);
  const auto dscale = vector(8, 0), dbias = vector(9, 0);
  const auto y = NewNumbers(dtype, size, 10, 0);
  const auto dx = NewNumbers(dtype, size, 11, 0);
  const auto dz = NewNumbers(dtype, size, 12, 0);
  const bool has_mask = test.gate == Gate::kMask;
  ExactMemory mask(shape.mask_bytes_per_group(), /*lead=*/0);
  const auto operand = [](const std::unique_ptr<Array>& array) {
    return VectorOperand{array->data(), 1};
  };

  QueuePool pool(2);
  cpu::Forward(
      pool, test.problem,
      NormaliseBuffers<1>{{x->data()},
                          test.residual ? z->data() : nullptr,
                          y->data(),
                          has_mask ? mask.data() : nullptr,
                          test.activation},
      PerInput<AffineOperands, 1>{{{operand(scale), operand(bias), kEpsilon}}},
      PerInput<void*, 1>{{mean->data()}}, PerInput<void*, 1>{{var->data()}});
  const void* saved = nullptr;
  if (test.gate == Gate::kY) saved = y->data();
  if (test.gate == Gate::kMask) saved = mask.data();
  if (test.gate == Gate::kZ) saved = z->data();
  cpu::Backward(pool, test.problem,
                GradientBuffers<1>{
                    dy->data(), {x->data()}, saved, test.gate, test.activation},
                PerInput<BackwardOperands, 1>{{{operand(mean),
                                                operand(var),
                                                operand(scale),
                                                operand(bias),
                                                {},
                                                {},
                                                kEpsilon}}},
                PerInput<void*, 1>{{dx->data()}},
                PerInput<void*, 1>{{dscale->data()}}, dbias->data(),
                test.residual ? dz->data() : nullptr);

  const double count = static_cast<double>(shape.count());
  const size_t elements = static_cast<size_t>(size);
  Numbers rstd, expected_y(elements), e(elements), expected_dx(elements);
  Numbers sum_e(static_cast<size_t>(channels)), sum_e_xhat(sum_e.size());
  for (int64_t c = 0; c < channels; ++c) {
    rstd.push_back(1 / std::sqrt((*var)[c] + kEpsilon));
  }
  const auto xhat = [&](int64_t i) {
    return ((*x)[i] - (*mean)[channel_of(i)]) * rstd[channel_of(i)];
  };
  for (int64_t i = 0; i < size; ++i) {
    const int64_t c = channel_of(i);
    const double u =
        xhat(i) * (*scale)[c] + (*bias)[c] + (test.residual ? (*z)[i] : 0);
    expected_y[i] = static_cast<double>(ExpectedOf(test.activation, u).value);
    // Where a derivative jumps, u may round to either side, and the kernels
    // must agree with themselves.
    const double at = test.activation.is_piecewise_linear() ? (*y)[i] : u;
    e[i] = (*dy)[i] *
           static_cast<double>(ExpectedOf(test.activation, at).derivative);
    if (has_mask) {
      const bool bit = mask.data()[i / 8] >> (i % 8) & 1;
      const bool open = ExpectedOf(test.activation, at).derivative == 1;
      BNAR_CHECK(bit == open, "bit " + std::to_string(i));
    }
    sum_e[c] += e[i];
    sum_e_xhat[c] += e[i] * xhat(i);
  }
  for (int64_t i = 0; i < size; ++i) {
    const int64_t c = channel_of(i);
    expected_dx[i] =
        (*scale)[c] * rstd[c] *
        (e[i] - sum_e[c] / count - xhat(i) * sum_e_xhat[c] / count);
  }
  CheckNear("y", *y, expected_y, tolerance);
  CheckNear("dx", *dx, expected_dx, tolerance);
  CheckNear("dbias", *dbias, sum_e, tolerance);
  CheckNear("dscale", *dscale, sum_e_xhat, tolerance);
  if (test.residual) CheckNear("dz", *dz, e, tolerance);
}

void TestAllKernels() {
  // Rows, rows with a tail, wide rows, planes with ragged ends, and planes of
  // more than one strip.
  const Shape shapes[] = {{1, 37, 16, 1},
                          {1, 131, 65, 1},
                          {1, 5, 2085, 1},
                          {1, 3, 5, 49},
                          {1, 2, 3, 2501}};
  for (const Shape& shape : shapes) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16,
                              DType::kFloat32, DType::kFloat64}) {
      for (const Activation& activation : kCurves) {
        for (const bool residual : {false, true}) {
          const auto test = [&](Gate gate) {
            context = "activation " +
                      std::to_string(static_cast<int>(activation.kind)) +
                      ", dtype " + std::to_string(static_cast<int>(dtype)) +
                      ", rows " + std::to_string(shape.rows) + ", channels " +
                      std::to_string(shape.channels) + ", inner " +
                      std::to_string(shape.inner) + ", gate " +
                      std::to_string(static_cast<int>(gate));
            TestKernels({{shape, dtype}, activation, gate, residual});
          };
          test(residual ? Gate::kZ : Gate::kX);
          if (!activation.is_piecewise_linear()) continue;
          test(Gate::kY);
          test(Gate::kMask);
        }
      }
    }
  }
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  SkipUnlessWantedIsa();
  TestExp<Float16, uint32_t>(0x80000001u, 997);
  TestExp<Float16, uint32_t>(0x00000001u, 997);
  TestExp<float, uint32_t>(0x80000001u, 997);
  TestExp<float, uint32_t>(0x00000001u, 997);
  TestExp<double, uint64_t>(0xbe00000000000001u, 0x16a3b5c7d9u);
  TestExp<double, uint64_t>(0x3e00000000000001u, 0x16a3b5c7d9u);
  TestEndsOfExp<Float16>();
  TestEndsOfExp<float>();
  TestEndsOfExp<double>();
  TestFunctions<Float16>();
  TestFunctions<float>();
  TestFunctions<double>();
  TestAllKernels();
  return Finish();
}
