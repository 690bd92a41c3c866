// Checks the results of each operation against plain loops in double.

#ifndef JAX_BNAR_TESTS_NATIVE_EXPECTATIONS_H_
#define JAX_BNAR_TESTS_NATIVE_EXPECTATIONS_H_

#include <vector>

#include "tests/native/calls.h"
#include "tests/native/inputs.h"

namespace jax_bnar {
namespace testing {

// e, which is dy times the derivative of the activation, and by how much it may
// be off before it is stored. Of a ReLU, nothing.
struct GatedGradient {
  std::vector<double> e;
  std::vector<double> error;
};
GatedGradient GatedGradientOf(Platform& platform, const Inputs& in, Gate gate);

void CheckStatistics(const Inputs& in, const Results& results);

// Also checks y of Forward, given the mean and var that it returned.
void CheckNormalised(const Inputs& in, const NormaliseOptions& options,
                     const Results& results);

void CheckReduced(const Inputs& in, const GatedGradient& e,
                  const Results& results);

void CheckApplied(const Inputs& in, const GatedGradient& e,
                  const Results& results);

void CheckBackward(const Inputs& in, const GatedGradient& e,
                   bool statistics_cotangents, const Results& results);

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_EXPECTATIONS_H_
