#include "tests/native/dual_checks.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/native/check.h"
#include "tests/native/dual_calls.h"
#include "tests/native/expectations.h"
#include "tests/native/operation_checks.h"

namespace jax_bnar {
namespace testing {
namespace {

constexpr Gate kDualGates[] = {Gate::kY, Gate::kMask, Gate::kX};

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

void CheckAll(Platform& platform, const DualInputs& in,
              const std::string& name) {
  const DualCalls calls(platform, in);
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
void CheckHalvesFromX(Platform& platform, const Case& c,
                      const std::string& name) {
  DualInputs in(c);
  for (int64_t i = 0; i < in.second.bias.size(); ++i) in.second.bias.Set(i, 0);
  const DualCalls calls(platform, in);
  context = name + " dual halves from x";
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

}  // namespace

void CheckDualCalls(Platform& platform, const Case& c,
                    const std::string& name) {
  const DualInputs in(c);
  CheckAll(platform, in, name);
  CheckHalvesFromX(platform, c, name);
  const DualInputs same(c);
  CheckInputsAreUntouched(in[0], same[0], name);
  CheckInputsAreUntouched(in[1], same[1], name);
}

}  // namespace testing
}  // namespace jax_bnar
