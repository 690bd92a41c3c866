// The number of inputs is a constant of the CPU kernels: compiled for three
// (BNAR_THREE_INPUTS), they agree with plain loops in double.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/operations.h"
#include "tests/native/check.h"
#include "tests/native/pools.h"

namespace jax_bnar {
namespace cpu {

namespace baseline {
const TileKernels& Kernels(DType dtype, DType out_dtype);
}

// Only the baseline is compiled for three inputs.
const TileKernels& KernelsFor(DType dtype, DType out_dtype) {
  return baseline::Kernels(dtype, out_dtype);
}
const char* IsaName() { return "baseline"; }

}  // namespace cpu

namespace testing {
namespace {

constexpr int kInputs = 3;
constexpr double kEpsilon = 1e-3;

using Floats = std::vector<float>;

// Numbers in [-1, 1) that differ from seed to seed.
Floats Numbers(int64_t count, uint32_t seed) {
  Floats numbers(static_cast<size_t>(count));
  uint32_t state = 2654435769u * (seed + 1);
  for (float& number : numbers) {
    state = state * 1664525u + 1013904223u;
    number = static_cast<float>(state >> 8) / (1 << 23) - 1.0f;
  }
  return numbers;
}

void CheckNear(const std::string& name, const Floats& found,
               const std::vector<double>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(found[i] - expected[i]);
    BNAR_CHECK(error <= 1e-4 * (1 + std::abs(expected[i])),
               name + "[" + std::to_string(i) + "] is " +
                   std::to_string(found[i]) + ", not " +
                   std::to_string(expected[i]));
  }
}

// What is computed for one channel of one input, in double.
struct Channel {
  double mean, rstd, a, bias, sum_e_centred;
};

// Without a gate there is no activation.
void TestShape(const Shape& shape, Gate gate) {
  const bool relu = gate != Gate::kNone;
  const Activation activation{relu ? ActivationKind::kRelu
                                   : ActivationKind::kNone};
  const Problem problem{shape, DType::kFloat32};
  const int64_t size = shape.size(), channels = shape.channels;
  const auto channel_of = [&](int64_t i) { return i / shape.inner % channels; };
  const auto vectors = [&](uint32_t seed) {
    return PerInputOf<kInputs>(
        [&](int input) { return Numbers(channels, 10 * seed + input); });
  };
  const auto arrays = [&](uint32_t seed) {
    return PerInputOf<kInputs>(
        [&](int input) { return Numbers(size, 10 * seed + input); });
  };
  const auto x = arrays(1);
  const auto scale = vectors(2), bias = vectors(3);
  const Floats dy = Numbers(size, 40);
  auto mean = vectors(5), var = vectors(6), dscale = vectors(7);
  auto dx = arrays(8);
  Floats y(static_cast<size_t>(size)), dbias(static_cast<size_t>(channels));
  std::vector<uint8_t> mask(static_cast<size_t>(shape.mask_bytes_per_group()));
  const auto data = [](PerInput<Floats, kInputs>& all) {
    return PerInputOf<kInputs>(
        [&](int input) -> void* { return all[input].data(); });
  };
  const auto operand = [](const Floats& vector) {
    return VectorOperand{vector.data(), 1};
  };
  const auto x_data = PerInputOf<kInputs>(
      [&](int input) -> const void* { return x[input].data(); });

  QueuePool pool(2);
  cpu::Forward(
      pool, problem,
      NormaliseBuffers<kInputs>{x_data, nullptr, y.data(),
                                relu ? mask.data() : nullptr, activation},
      PerInputOf<kInputs>([&](int input) {
        return AffineOperands{operand(scale[input]), operand(bias[input]),
                              kEpsilon};
      }),
      data(mean), data(var));
  const void* saved = gate == Gate::kY      ? static_cast<const void*>(y.data())
                      : gate == Gate::kMask ? mask.data()
                                            : nullptr;
  cpu::Backward(
      pool, problem,
      GradientBuffers<kInputs>{dy.data(), x_data, saved, gate, activation},
      PerInputOf<kInputs>([&](int input) {
        return BackwardOperands{operand(mean[input]),
                                operand(var[input]),
                                operand(scale[input]),
                                operand(bias[input]),
                                {},
                                {},
                                kEpsilon};
      }),
      data(dx), data(dscale), dbias.data(), /*dz=*/nullptr);

  const double count = static_cast<double>(shape.count());
  std::vector<double> sums(static_cast<size_t>(size)), e(sums.size());
  std::vector<double> sum_e(static_cast<size_t>(channels));
  std::vector<std::vector<Channel>> expected;
  for (int input = 0; input < kInputs; ++input) {
    std::vector<double> total(sum_e.size()), squares(sum_e.size());
    for (int64_t i = 0; i < size; ++i) total[channel_of(i)] += x[input][i];
    for (int64_t i = 0; i < size; ++i) {
      const double centred = x[input][i] - total[channel_of(i)] / count;
      squares[channel_of(i)] += centred * centred;
    }
    std::vector<double> means, vars;
    expected.emplace_back();
    for (int64_t c = 0; c < channels; ++c) {
      means.push_back(total[c] / count);
      vars.push_back(squares[c] / count);
      const double rstd = 1 / std::sqrt(vars[c] + kEpsilon);
      expected[input].push_back(
          {means[c], rstd, scale[input][c] * rstd, bias[input][c], 0});
    }
    CheckNear("mean", mean[input], means);
    CheckNear("var", var[input], vars);
    for (int64_t i = 0; i < size; ++i) {
      const Channel& own = expected[input][channel_of(i)];
      sums[i] += (x[input][i] - own.mean) * own.a + own.bias;
    }
  }
  std::vector<double> expected_y;
  for (const double sum : sums) {
    expected_y.push_back(relu ? std::max(sum, 0.0) : sum);
  }
  CheckNear("y", y, expected_y);
  for (int64_t i = 0; i < size; ++i) {
    // A sum near 0 may round to either side, and the kernels must agree with
    // themselves.
    e[i] = !relu || y[i] > 0 ? dy[i] : 0;
    const bool bit = mask[i / 8] >> (i % 8) & 1;
    BNAR_CHECK(bit == (relu && y[i] > 0), "bit " + std::to_string(i));
    sum_e[channel_of(i)] += e[i];
  }
  CheckNear("dbias", dbias, sum_e);
  for (int input = 0; input < kInputs; ++input) {
    const auto centred = [&](int64_t i) {
      return x[input][i] - expected[input][channel_of(i)].mean;
    };
    for (int64_t i = 0; i < size; ++i) {
      expected[input][channel_of(i)].sum_e_centred += e[i] * centred(i);
    }
    std::vector<double> dscales, dxs;
    for (const Channel& own : expected[input]) {
      dscales.push_back(own.rstd * own.sum_e_centred);
    }
    for (int64_t i = 0; i < size; ++i) {
      const Channel& own = expected[input][channel_of(i)];
      dxs.push_back(own.a * (e[i] - sum_e[channel_of(i)] / count -
                             centred(i) * own.rstd * own.rstd *
                                 own.sum_e_centred / count));
    }
    CheckNear("dscale", dscale[input], dscales);
    CheckNear("dx", dx[input], dxs);
  }
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar;
  using namespace jax_bnar::testing;
  const Shape shapes[] = {
      {1, 37, 16, 1}, {1, 300, 65, 1}, {1, 37, 7, 3}, {1, 3, 5, 49}};
  for (const Shape& shape : shapes) {
    for (const Gate gate : {Gate::kNone, Gate::kX, Gate::kY, Gate::kMask}) {
      context = "rows " + std::to_string(shape.rows) + ", channels " +
                std::to_string(shape.channels) + ", inner " +
                std::to_string(shape.inner) + ", gate " +
                std::to_string(static_cast<int>(gate));
      TestShape(shape, gate);
    }
  }
  return Finish();
}
