// Calls of the operations with two normalised inputs. Each allocates its
// results.

#ifndef JAX_BNAR_TESTS_NATIVE_DUAL_CALLS_H_
#define JAX_BNAR_TESTS_NATIVE_DUAL_CALLS_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "native/problem.h"
#include "tests/native/calls.h"
#include "tests/native/inputs.h"
#include "tests/native/platform.h"

namespace jax_bnar {
namespace testing {

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
  Problem problem() const { return first.c.problem(); }
  Both<const void*> x() const { return {first.x.data(), second.x.data()}; }

  Inputs first;
  Inputs second;
};

// The results that belong to x1 and to x2. y, the mask and the sums of e are
// among those of x1.
using DualResults = std::pair<Results, Results>;

class DualCalls {
 public:
  DualCalls(Platform& platform, const DualInputs& in)
      : platform_(platform), in_(in) {}

  DualResults Forward(bool affine, bool mask) const {
    DualResults r;
    for (Results* each : {&r.first, &r.second}) {
      each->mean = NewVector(in_.first.c);
      each->var = NewVector(in_.first.c);
    }
    platform_.DualForward(in_.problem(), Buffers(mask, &r.first),
                          BothAffine(affine),
                          {r.first.mean->data(), r.second.mean->data()},
                          {r.first.var->data(), r.second.var->data()});
    return r;
  }

  DualResults Normalise(bool affine, bool mask) const {
    DualResults r;
    platform_.DualNormalise(
        in_.problem(), Buffers(mask, &r.first), BothAffine(affine),
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
    platform_.DualBackwardReduce(
        in_.problem(), Saved(gate), operands, r.first.first->data(),
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
    platform_.DualBackwardApply(in_.problem(), Saved(gate), operands,
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
    platform_.DualBackward(in_.problem(), Saved(gate), operands,
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

  Platform& platform_;
  const DualInputs& in_;
};

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_DUAL_CALLS_H_
