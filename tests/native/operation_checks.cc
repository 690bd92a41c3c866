#include "tests/native/operation_checks.h"

#include <vector>

#include "tests/native/check.h"
#include "tests/native/expectations.h"

namespace jax_bnar {
namespace testing {

void CheckForwardCalls(Platform& platform, const Inputs& in,
                       const std::string& name, Calls calls) {
  const bool all = calls == Calls::kAll;
  context = name + " statistics";
  if (all) CheckStatistics(in, CallStatistics(platform, in));
  for (const NormaliseOptions& options : kNormaliseOptions) {
    const std::string flags = std::string(options.relu ? " relu" : "") +
                              (options.residual ? " residual" : "") +
                              (options.mask ? " mask" : "") +
                              (options.affine ? " affine" : "");
    context = name + " normalise" + flags;
    if (all) {
      CheckNormalised(in, options, CallNormalise(platform, in, options));
    }
    context = name + " forward" + flags;
    const Results forward = CallForward(platform, in, options);
    CheckStatistics(in, forward);
    CheckNormalised(in, options, forward);
  }
}

void CheckBackwardCalls(Platform& platform, const Inputs& in,
                        const std::string& name, Calls calls) {
  const bool all = calls == Calls::kAll;
  for (const Gate gate : kGates) {
    const std::string suffix =
        " with gate " + std::to_string(static_cast<int>(gate));
    context = name + " normalise for" + suffix;
    const std::vector<double> e = GatedGradient(platform, in, gate);
    for (const bool residual : {false, true}) {
      const std::string flags = suffix + (residual ? " and residual" : "");
      context = name + " reduce" + flags;
      if (all) {
        CheckReduced(in, e, CallReduce(platform, in, gate, residual));
      }
      context = name + " backward" + flags;
      CheckBackward(in, e, residual,
                    CallBackward(platform, in, gate, residual, residual));
    }
    context = name + " apply" + suffix;
    if (all) CheckApplied(in, e, CallApply(platform, in, gate));
  }
}

void CheckInputsAreUntouched(const Inputs& in, const Inputs& same,
                             const std::string& name) {
  context = name + " operands";
  BNAR_CHECK(in.x.memory().Copy() == same.x.memory().Copy() &&
                 in.z.memory().Copy() == same.z.memory().Copy() &&
                 in.dy.memory().Copy() == same.dy.memory().Copy() &&
                 in.y.memory().Copy() == same.y.memory().Copy() &&
                 in.mask.Copy() == same.mask.Copy(),
             "an operand was written");
}

}  // namespace testing
}  // namespace jax_bnar
