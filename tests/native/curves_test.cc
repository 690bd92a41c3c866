// Tests the functions of the activations other than ReLU: their accuracy, and
// that they give the same bits with every instruction set. kernels_test has the
// kernels that call them.

#include "cpu/isa/curves.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "tests/native/activations.h"
#include "tests/native/check.h"

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

// Those that the kernels call. Sets for bfloat16 have those for 16 bits alone.
template <typename T>
Functions<T> FunctionsOfIsa() {
  const std::string name = cpu::IsaName();
#if defined(__x86_64__)
  if (name == "avx2") {
    return {cpu::avx2::Activate<T>, cpu::avx2::Differentiate<T>};
  }
  if constexpr (sizeof(T) == 2) {
    if (name == "avx512bf16") {
      return {cpu::avx512bf16::Activate<T>, cpu::avx512bf16::Differentiate<T>};
    }
  }
  if (name == "avx512" || name == "avx512bf16") {
    return {cpu::avx512::Activate<T>, cpu::avx512::Differentiate<T>};
  }
#elif defined(__aarch64__)
  if constexpr (sizeof(T) == 2) {
    if (name == "neonbf16") {
      return {cpu::neonbf16::Activate<T>, cpu::neonbf16::Differentiate<T>};
    }
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

// act(u) and its derivative, where u has type A, and by how much larger than
// otherwise a relative error of the value may be.
struct Expected {
  long double value;
  long double derivative;
  long double error = 1;
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
    case ActivationKind::kElu:
      return u > 0 ? Expected{u, 1} : Expected{std::expm1(u), std::exp(u)};
    case ActivationKind::kGelu: {
      // An error of w is one of e^-w.
      const long double root = std::sqrt(2 / std::acos(-1.0L));
      const long double w = 2 * root * (u + 0.044715L * u * u * u);
      const long double slope = 2 * root * (1 + 3 * 0.044715L * u * u);
      const long double sigmoid = 1 / (1 + std::exp(-w));
      const long double rest = 1 / (1 + std::exp(w));
      return {u * sigmoid, sigmoid * (1 + u * slope * rest),
              1 + std::min(std::fabs(w), 1e3L)};
    }
    case ActivationKind::kExactGelu: {
      // An error of u^2 / 2 is one of e^(-u^2 / 2), and the polynomial has
      // errors of its own.
      const long double half_square = u * u / 2;
      const long double below = std::erfc(-u / std::sqrt(2.0L)) / 2;
      const long double density =
          std::exp(-half_square) / std::sqrt(2 * std::acos(-1.0L));
      return {u * below, below + u * density, 2 + std::min(half_square, 1e3L)};
    }
    case ActivationKind::kMish: {
      const long double tanh = std::tanh(std::log1p(std::exp(u)));
      const long double sigmoid = 1 / (1 + std::exp(-u));
      const long double cosh = std::cosh(std::log1p(std::exp(u)));
      return {u * tanh, tanh + u * sigmoid / (cosh * cosh)};
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
    context = NameOf(activation) + " in " + kName<T>;
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
      BNAR_CHECK(std::fabs(values[i] - expected.value) <=
                     4 * kErrors<T> * expected.error * ulp + least,
                 std::to_string(values[i]) + at);
      const long double epsilon = std::numeric_limits<A>::epsilon();
      BNAR_CHECK(std::fabs(derivatives[i] - expected.derivative) <=
                     4 * kErrors<T> * epsilon + least,
                 std::to_string(derivatives[i]) + at);
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
  return Finish();
}
