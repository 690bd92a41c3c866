// The operands of one case, which has one or two inputs. Activations are small
// multiples of 1/4, or of 2^-12, so that sums of them, and of their products,
// are exact in any order.

#ifndef JAX_BNAR_TESTS_NATIVE_INPUTS_H_
#define JAX_BNAR_TESTS_NATIVE_INPUTS_H_

#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "native/problem.h"
#include "tests/native/activations.h"
#include "tests/native/array.h"
#include "tests/native/formats.h"

namespace jax_bnar {
namespace testing {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // An integer in [0, end).
  int64_t Below(int64_t end) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((state_ >> 33) % static_cast<uint64_t>(end));
  }
  // A multiple of 1/4 in [-radius / 4, radius / 4].
  double Quarters(int64_t radius) {
    return 0.25 * static_cast<double>(Below(2 * radius + 1) - radius);
  }

 private:
  uint64_t state_;
};

struct Case {
  Shape shape;
  DType dtype;
  // By how many elements operands and results are offset from a multiple of 128
  // bytes.
  int64_t operand_lead = 0;
  int64_t result_lead = 0;
  // Whether vectors have a row for each group, or one for all groups.
  bool vectors_by_group = false;
  int64_t mask_channels = 0;
  // How many arrays are normalised and added up: 1 or 2.
  int inputs = 1;
  DType out_dtype = dtype;
  // What follows where a call asks for an activation.
  Activation activation = {ActivationKind::kRelu};

  Problem problem() const { return {shape, dtype, mask_channels, out_dtype}; }
  int64_t size() const { return shape.groups * shape.group_size(); }
  int64_t vector_groups() const { return vectors_by_group ? shape.groups : 1; }
  int64_t mask_bytes() const {
    return shape.groups * shape.mask_bytes_per_group();
  }

  // The index of an element's bit in the mask.
  int64_t MaskBitIndex(int64_t i) const {
    const int64_t group = i / shape.group_size();
    int64_t bit = i % shape.group_size();
    if (mask_channels > 0) {
      const int64_t row = bit / shape.channels, channel = bit % shape.channels;
      const int64_t run = channel / mask_channels * shape.rows + row;
      bit = run * mask_channels + channel % mask_channels;
    }
    return 8 * group * shape.mask_bytes_per_group() + bit;
  }
  bool MaskBit(const uint8_t* mask, int64_t i) const {
    const int64_t bit = MaskBitIndex(i);
    return (mask[bit / 8] >> (bit % 8)) & 1;
  }

  std::string Name() const {
    std::string name = FormatOf(dtype).name;
    if (out_dtype != dtype) name += std::string(" ") + FormatOf(out_dtype).name;
    for (const int64_t n :
         {shape.groups, shape.rows, shape.channels, shape.inner, operand_lead,
          result_lead, vector_groups(), mask_channels,
          static_cast<int64_t>(inputs)}) {
      name += " " + std::to_string(n);
    }
    return name + " " + NameOf(activation);
  }
};

// One array that is normalised, with its vectors, and the arrays beside it.
struct Input {
  static constexpr double kEpsilon = 1e-3;

  // Another `seed`, other elements.
  Input(const Case& c, uint64_t seed)
      : c(c),
        format(FormatOf(c.dtype)),
        out_format(FormatOf(c.out_dtype)),
        accumulator(FormatOf(AccumulatorOf(c.dtype))),
        x(c.dtype, c.size(), c.operand_lead),
        z(c.out_dtype, c.size(), c.operand_lead),
        dy(c.out_dtype, c.size(), c.operand_lead),
        y(c.out_dtype, c.size(), c.operand_lead),
        mask(c.mask_bytes(), c.operand_lead),
        mean(MakeVector()),
        var(MakeVector()),
        scale(MakeVector()),
        bias(MakeVector()),
        dmean(MakeVector()),
        dvar(MakeVector()),
        b(MakeVector()),
        k(MakeVector()),
        channels_(ChannelOfEach(c)) {
    Random random(static_cast<uint64_t>(c.size()) * 31 + seed);
    FillVectors(&random);
    const std::vector<double> centre = Spread(mean);
    // Where z and dy are wider than x, this would be lost in the dtype of x.
    const double fine = c.out_dtype == c.dtype ? 0 : 0x1p-12;
    for (int64_t i = 0; i < c.size(); ++i) {
      x.Set(i, centre[ChannelOf(i)] + random.Quarters(8));
      z.Set(i, random.Quarters(12) + fine);
      dy.Set(i, random.Quarters(6) + fine);
    }
    FillSaved(&random);
  }

  VectorOperand Operand(const Array& vector) const {
    return {vector.data(), c.vector_groups()};
  }
  // The position of element i in vectors of shape (G, C).
  size_t ChannelOf(int64_t i) const {
    return channels_[static_cast<size_t>(i)];
  }
  // The vector's value for each of (G, C).
  std::vector<double> Spread(const Array& vector) const {
    std::vector<double> values(
        static_cast<size_t>(c.shape.groups * c.shape.channels));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = vector[static_cast<int64_t>(i) % vector.size()];
    }
    return values;
  }

  Case c;
  Format format;
  Format out_format;
  Format accumulator;
  // y is what is saved for the gate; it is independent of x.
  Array x, z, dy, y;
  ExactMemory mask;
  Array mean, var, scale, bias, dmean, dvar, b, k;

 private:
  std::vector<size_t> channels_;

  static std::vector<size_t> ChannelOfEach(const Case& c) {
    std::vector<size_t> channels;
    channels.reserve(static_cast<size_t>(c.size()));
    const Shape& shape = c.shape;
    for (int64_t g = 0; g < shape.groups; ++g) {
      for (int64_t row = 0; row < shape.rows; ++row) {
        for (int64_t channel = 0; channel < shape.channels; ++channel) {
          channels.insert(channels.end(), static_cast<size_t>(shape.inner),
                          static_cast<size_t>(g * shape.channels + channel));
        }
      }
    }
    return channels;
  }

  Array MakeVector() const {
    return Array(AccumulatorOf(c.dtype), c.vector_groups() * c.shape.channels,
                 c.operand_lead);
  }

  void FillVectors(Random* random) {
    // Values around the largest that round to zero in 16-bit dtypes: where
    // y = bias, its sign is the gate.
    const double tiny[] = {0.0, 0x1p-25, 0x1.000002p-25, 0x1p-134, 0x1.1p-134};
    // These cancel (x - mean) * a exactly for one value of x, so that the last
    // bit of a is the gate.
    const double centred[] = {0.25, -0.5, 1.0, -2.0};
    for (int64_t i = 0; i < mean.size(); ++i) {
      mean.Set(i, random->Quarters(20));
      var.Set(i, 0.5 + std::fabs(random->Quarters(8)));
      scale.Set(i, random->Quarters(8));
      const double a = scale[i] * (1.0 / std::sqrt(var[i] + kEpsilon));
      bias.Set(i, i % 3 == 0   ? tiny[i / 3 % 5]
                  : i % 3 == 1 ? -centred[i / 3 % 4] * a
                               : random->Quarters(4) / 3);
      dmean.Set(i, random->Quarters(8));
      dvar.Set(i, random->Quarters(8));
      b.Set(i, random->Quarters(8) / 3);
      k.Set(i, random->Quarters(8) / 3);
    }
  }

  void FillSaved(Random* random) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const double values[] = {-1.0,
                             -0.0,
                             0.0,
                             nan,
                             0.5,
                             3.0,
                             out_format.smallest_subnormal(),
                             -out_format.smallest_subnormal()};
    // Padding bits are set, because they must not matter.
    for (int64_t i = 0; i < mask.size(); ++i) mask.data()[i] = 0xff;
    for (int64_t i = 0; i < c.size(); ++i) {
      y.Set(i, values[random->Below(8)]);
      if (y[i] > 0) continue;
      const int64_t bit = c.MaskBitIndex(i);
      mask.data()[bit / 8] &= static_cast<uint8_t>(~(1u << (bit % 8)));
    }
  }
};

// All inputs of a case. What they share (z, dy, y and the mask) is that of the
// first one.
class Inputs {
 public:
  explicit Inputs(const Case& c) : c(c) {
    for (int i = 0; i < c.inputs; ++i) {
      each_.emplace_back(c, /*seed=*/static_cast<uint64_t>(7 + 4 * i));
      if (i == 0) continue;
      // Where y is only the bias, one of two biases may be tiny and the other
      // is 0: AVX-512's conversion to bfloat16 flushes the sum of two tiny ones
      // to 0, and this comparison has no tolerance.
      Array& bias = each_.back().bias;
      for (int64_t k = 0; k < bias.size(); k += 3) bias.Set(k, 0);
    }
  }

  int count() const { return c.inputs; }
  const Input& operator[](int i) const { return each_[static_cast<size_t>(i)]; }
  // The one whose z, dy, y and mask all of them share.
  const Input& first() const { return each_.front(); }

  Case c;

 private:
  std::deque<Input> each_;  // whose elements never move
};

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_INPUTS_H_
