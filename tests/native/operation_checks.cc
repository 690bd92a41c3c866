#include "tests/native/operation_checks.h"

#include <string>
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
  for (const NormaliseOptions& options : NormaliseOptionsOf(in.c)) {
    const std::string flags =
        std::string(options.activation ? " activation" : "") +
        (options.residual ? " residual" : "") + (options.mask ? " mask" : "") +
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
  for (const Gate gate : GatesOf(in.c)) {
    const std::string suffix =
        " with gate " + std::to_string(static_cast<int>(gate));
    context = name + " normalise for" + suffix;
    const GatedGradient e = GatedGradientOf(platform, in, gate);
    for (const bool more : {false, true}) {
      const bool residual = more && in.count() == 1;
      context = name + " backward" + suffix + (more ? " and more" : "");
      CheckBackward(in, e, more,
                    CallBackward(platform, in, gate, residual, more));
    }
    if (calls != Calls::kAll) continue;
    for (const bool residual : {false, true}) {
      if (residual && in.count() > 1) break;
      context = name + " reduce" + suffix + (residual ? " and residual" : "");
      CheckReduced(in, e, CallReduce(platform, in, gate, residual));
    }
    context = name + " apply" + suffix;
    CheckApplied(in, e, CallApply(platform, in, gate));
  }
}

void CheckInputsAreUntouched(const Inputs& in, const Inputs& same,
                             const std::string& name) {
  context = name + " operands";
  for (int i = 0; i < in.count(); ++i) {
    BNAR_CHECK(in[i].x.memory().Copy() == same[i].x.memory().Copy() &&
                   in[i].z.memory().Copy() == same[i].z.memory().Copy() &&
                   in[i].dy.memory().Copy() == same[i].dy.memory().Copy() &&
                   in[i].y.memory().Copy() == same[i].y.memory().Copy() &&
                   in[i].mask.Copy() == same[i].mask.Copy(),
               "an operand was written");
  }
}

}  // namespace testing
}  // namespace jax_bnar
