// Compares the operations with two normalised inputs, on many shapes, dtypes
// and flags, with plain loops, as kernels_test.cc does for one input.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpu/cache.h"
#include "cpu/operations.h"
#include "tests/native/calls.h"
#include "tests/native/check.h"
#include "tests/native/expectations.h"
#include "tests/native/inputs.h"
#include "tests/native/operation_checks.h"
#include "tests/native/pools.h"

namespace jax_bnar {
namespace testing {
namespace {

constexpr Gate kDualGates[] = {Gate::kY, Gate::kMask, Gate::kX};

// The inputs that belong to x1 and to x2. What both share (dy, y, mask) is
// taken from the first.
struct DualInputs {
  explicit DualInputs(const Case& c) : first(c), second(c, /*seed=*/11) {
    // Where y is only the bias, one of the two biases may be tiny and the other
    // is 0: AVX-512's conversion to bfloat16 flushes the sum of two tiny ones
    // to 0, and this comparison has no tolerance.
    for (int64_t i = 0; i < second.bias.size(); i += 3) second.bias.Set(i, 0);
  }

  const Inputs& operator[](int input) const {
    return input == 0 ? first : second;
  }
  Problem problem() const { return {first.c.shape, first.c.dtype}; }
  Both<const void*> x() const { return {first.x.data(), second.x.data()}; }

  Inputs first;
  Inputs second;
};

// The results that belong to x1 and to x2. y, the mask and the sums of e are
// among those of x1.
using DualResults = std::pair<Results, Results>;

class DualCalls {
 public:
  DualCalls(cpu::ThreadPool& pool, const DualInputs& in)
      : pool_(pool), in_(in) {}

  DualResults Forward(bool affine, bool mask) const {
    DualResults r;
    for (Results* each : {&r.first, &r.second}) {
      each->mean = NewVector(in_.first.c);
      each->var = NewVector(in_.first.c);
    }
    cpu::DualForward(pool_, in_.problem(), Buffers(mask, &r.first),
                     BothAffine(affine),
                     {r.first.mean->data(), r.second.mean->data()},
                     {r.first.var->data(), r.second.var->data()});
    return r;
  }

  DualResults Normalise(bool affine, bool mask) const {
    DualResults r;
    cpu::DualNormalise(
        pool_, in_.problem(), Buffers(mask, &r.first), BothAffine(affine),
        {in_[0].Operand(in_[0].mean), in_[1].Operand(in_[1].mean)},
        {in_[0].Operand(in_[0].var), in_[1].Operand(in_[1].var)});
    return r;
  }

  DualResults Reduce(Gate gate) const {
    DualResults r;
    r.first.first = NewVector(in_.first.c);
    r.first.second = NewVector(in_.first.c);
    r.second.second = NewVector(in_.first.c);
    const bool from_x = gate == Gate::kX;
    Both<ReduceOperands> operands;
    for (int input = 0; input < 2; ++input) {
      const Inputs& in = in_[input];
      operands[input] = {in.Operand(in.mean),
                         from_x ? in.Operand(in.a) : VectorOperand{},
                         from_x ? in.Operand(in.bias) : VectorOperand{}};
    }
    // There is only one bias, which is present if the gate needs it.
    operands[1].bias = VectorOperand{};
    cpu::DualBackwardReduce(pool_, in_.problem(), Saved(gate), operands,
                            r.first.first->data(),
                            {r.first.second->data(), r.second.second->data()});
    return r;
  }

  DualResults Apply(Gate gate) const {
    DualResults r;
    Both<ApplyOperands> operands;
    for (int input = 0; input < 2; ++input) {
      const Inputs& in = in_[input];
      operands[input] = {in.Operand(in.mean), in.Operand(in.a),
                         in.Operand(in.b), in.Operand(in.k), VectorOperand{}};
    }
    if (gate == Gate::kX) operands[0].bias = in_[0].Operand(in_[0].bias);
    r.first.dx = NewArray(in_.first.c);
    r.second.dx = NewArray(in_.first.c);
    cpu::DualBackwardApply(pool_, in_.problem(), Saved(gate), operands,
                           {r.first.dx->data(), r.second.dx->data()});
    return r;
  }

  DualResults Backward(Gate gate, bool statistics_cotangents) const {
    DualResults r;
    Both<BackwardOperands> operands;
    for (int input = 0; input < 2; ++input) {
      const Inputs& in = in_[input];
      const auto cotangent = [&](const Array& vector) {
        return statistics_cotangents ? in.Operand(vector) : VectorOperand{};
      };
      operands[input] = {in.Operand(in.mean),  in.Operand(in.var),
                         in.Operand(in.scale), in.Operand(in.bias),
                         cotangent(in.dmean),  cotangent(in.dvar),
                         Inputs::kEpsilon};
    }
    r.first.first = NewVector(in_.first.c);
    r.first.second = NewVector(in_.first.c);
    r.second.second = NewVector(in_.first.c);
    r.first.dx = NewArray(in_.first.c);
    r.second.dx = NewArray(in_.first.c);
    cpu::DualBackward(pool_, in_.problem(), Saved(gate), operands,
                      {r.first.dx->data(), r.second.dx->data()},
                      {r.first.second->data(), r.second.second->data()},
                      r.first.first->data());
    return r;
  }

 private:
  DualNormaliseBuffers Buffers(bool mask, Results* results) const {
    results->y = NewArray(in_.first.c);
    if (mask) {
      results->mask = std::make_unique<ExactMemory>(in_.first.c.mask_bytes(),
                                                    in_.first.c.result_lead);
    }
    return {in_.x(), results->y->data(),
            mask ? results->mask->data() : nullptr};
  }

  Both<AffineOperands> BothAffine(bool present) const {
    return {Affine(in_[0], present), Affine(in_[1], present)};
  }

  DualGradientBuffers Saved(Gate gate) const {
    const GradientBuffers one = Gradient(in_.first, gate);
    return {one.dy, in_.x(), one.saved, gate};
  }

  cpu::ThreadPool& pool_;
  const DualInputs& in_;
};

// Returns dy where this y is positive and 0 elsewhere.
std::vector<double> WherePositive(const DualInputs& in, const Array& y) {
  std::vector<double> e(static_cast<size_t>(in.first.c.size()));
  for (int64_t i = 0; i < in.first.c.size(); ++i) {
    e[static_cast<size_t>(i)] = y[i] > 0 ? in.first.dy[i] : 0.0;
  }
  return e;
}

// Moves the sum of e, which both inputs share, from the results of x1 to those
// of x2, where CheckBackward and CheckReduced look for it.
void MoveSum(DualResults* results) {
  results->second.first = std::move(results->first.first);
}

void CheckAll(cpu::ThreadPool& pool, const DualInputs& in,
              const std::string& name) {
  const DualCalls calls(pool, in);
  CpuPlatform platform(pool);
  for (const bool affine : {false, true}) {
    for (const bool mask : {false, true}) {
      context = name + " dual forward";
      const DualResults forward = calls.Forward(affine, mask);
      CheckStatistics(in[0], forward.first);
      CheckStatistics(in[1], forward.second);
      CheckDualNormalised(in[0], in[1], affine, forward.first, forward.second);
      context = name + " dual normalise";
      const DualResults normalised = calls.Normalise(affine, mask);
      CheckDualNormalised(in[0], in[1], affine, normalised.first,
                          normalised.second);
    }
  }
  for (const Gate gate : kDualGates) {
    const std::string suffix =
        " with gate " + std::to_string(static_cast<int>(gate));
    const bool from_x = gate == Gate::kX;
    context = name + " dual backward" + suffix;
    const std::vector<double> e =
        from_x ? WherePositive(in, *calls.Normalise(true, false).first.y)
               : GatedGradient(platform, in.first, gate);
    for (const bool cotangents : {false, true}) {
      DualResults backward = calls.Backward(gate, cotangents);
      CheckBackward(in[0], e, cotangents, backward.first);
      MoveSum(&backward);
      CheckBackward(in[1], e, cotangents, backward.second);
    }
    if (from_x) continue;  // its bias is the sum, which is rounded differently
    context = name + " dual reduce" + suffix;
    DualResults reduced = calls.Reduce(gate);
    CheckReduced(in[0], e, reduced.first);
    MoveSum(&reduced);
    CheckReduced(in[1], e, reduced.second);
    context = name + " dual apply" + suffix;
    const DualResults applied = calls.Apply(gate);
    CheckApplied(in[0], e, applied.first);
    CheckApplied(in[1], e, applied.second);
  }
}

// Checks the halves with Gate::kX. Their one bias is that of x1 here, because
// the bias of x2 is set to 0.
void CheckHalvesFromX(cpu::ThreadPool& pool, const Case& c) {
  DualInputs in(c);
  for (int64_t i = 0; i < in.second.bias.size(); ++i) in.second.bias.Set(i, 0);
  const DualCalls calls(pool, in);
  context = c.Name() + " dual halves from x";
  const std::vector<double> e =
      WherePositive(in, *calls.Normalise(true, false).first.y);
  DualResults reduced = calls.Reduce(Gate::kX);
  CheckReduced(in[0], e, reduced.first);
  MoveSum(&reduced);
  CheckReduced(in[1], e, reduced.second);
  const DualResults applied = calls.Apply(Gate::kX);
  CheckApplied(in[0], e, applied.first);
  CheckApplied(in[1], e, applied.second);
}

void TestShape(const Shape& shape) {
  CallerOnly pool;
  for (const DType dtype : kDTypes) {
    for (const int64_t lead : {0, 1}) {
      const Case c{shape, dtype, lead, lead, /*vectors_by_group=*/lead == 0};
      const DualInputs in(c);
      CheckAll(pool, in, c.Name());
      CheckHalvesFromX(pool, c);
      const DualInputs same(c);
      CheckInputsAreUntouched(in[0], same[0], c.Name());
      CheckInputsAreUntouched(in[1], same[1], c.Name());
    }
  }
}

void TestShapes() {
  for (const int64_t channels : {1, 3, 65, 251}) {
    for (const int64_t rows : {1, 2, 17, 33}) TestShape({1, rows, channels, 1});
  }
  for (const int64_t channels : {16, 64, 80}) TestShape({1, 37, channels, 1});
  for (const int64_t rows : {129, 300}) TestShape({1, rows, 16, 1});
  TestShape({1, 2100, 3, 1});
  for (const int64_t channels : {528, 1040, 2064}) {
    TestShape({1, 35, channels, 1});
  }
  TestShape({3, 19, 65, 1});
  TestShape({2, 40, 32, 1});
  TestShape({2, 5, 7, 3});
  for (const int64_t inner : {16, 17, 31, 49, 196}) {
    TestShape({1, 3, 5, inner});
    TestShape({2, 2, 3, inner});
  }
  TestShape({1, 2, 3, 2049});
  TestShape({3, 2, 1, 77});
}

// Results too large for the cache bypass it, if their vectors are aligned.
void TestStreaming() {
  for (const DType dtype : kDTypes) {
    const int64_t elements = cpu::kCacheBytes /
                             cpu::ArraysOfStep(/*residual=*/true) /
                             FormatOf(dtype).item_size;
    for (const int64_t lead : {0, 1}) {
      for (const Shape& shape : {Shape{1, elements / 64 + 3, 64, 1},
                                 Shape{1, elements / 65 + 7, 65, 1},
                                 Shape{1, elements / (3 * 256) + 1, 3, 256}}) {
        const Case c{shape, dtype, /*operand_lead=*/1, lead, true};
        const DualInputs in(c);
        QueuePool pool(2);
        CheckAll(pool, in, c.Name() + " streaming");
      }
      if (dtype != DType::kFloat32) break;
    }
  }
}

void TestNumberOfThreads() {
  for (const DType dtype : kDTypes) {
    for (const Shape& shape : {Shape{1, 3001, 65, 1}, Shape{1, 700, 256, 1},
                               Shape{3, 401, 64, 1}, Shape{4, 8, 30, 196}}) {
      const Case c{shape, dtype, 0, 0, true};
      const DualInputs in(c);
      context = c.Name() + " dual threads";
      const auto bytes = [&](cpu::ThreadPool& pool) {
        const DualCalls calls(pool, in);
        std::vector<std::vector<uint8_t>> all;
        const auto add = [&](const DualResults& results) {
          for (const Results* each : {&results.first, &results.second}) {
            for (const auto& array : each->Bytes()) all.push_back(array);
          }
        };
        add(calls.Forward(true, true));
        add(calls.Backward(Gate::kX, true));
        return all;
      };
      CallerOnly caller;
      const auto expected = bytes(caller);
      for (const int64_t threads : {2, 5}) {
        QueuePool pool(threads);
        BNAR_CHECK(bytes(pool) == expected,
                   std::to_string(threads) + " threads change the result");
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
  TestShapes();
  TestStreaming();
  TestNumberOfThreads();
  return Finish();
}
