// Checks the results of each operation against plain loops in double.

#ifndef JAX_BNAR_TESTS_NATIVE_EXPECTATIONS_H_
#define JAX_BNAR_TESTS_NATIVE_EXPECTATIONS_H_

#include <vector>

#include "tests/native/calls.h"
#include "tests/native/inputs.h"

namespace jax_bnar {
namespace testing {

// dy where the gate is open, and 0 elsewhere.
std::vector<double> GatedGradient(Platform& platform, const Inputs& in,
                                  Gate gate);

void CheckStatistics(const Inputs& in, const Results& results);

// Also checks y of Forward, given the mean and var that it returned.
void CheckNormalised(const Inputs& in, const NormaliseOptions& options,
                     const Results& results);

void CheckReduced(const Inputs& in, const std::vector<double>& e,
                  const Results& results);

void CheckApplied(const Inputs& in, const std::vector<double>& e,
                  const Results& results);

void CheckBackward(const Inputs& in, const std::vector<double>& e,
                   bool statistics_cotangents, const Results& results);

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_EXPECTATIONS_H_
