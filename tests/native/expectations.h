// What each operation must return, from plain loops in double.

#ifndef JAX_BNAR_TESTS_NATIVE_EXPECTATIONS_H_
#define JAX_BNAR_TESTS_NATIVE_EXPECTATIONS_H_

#include <vector>

#include "tests/native/calls.h"
#include "tests/native/inputs.h"

namespace jax_bnar {
namespace testing {

// dy where the gate is open, else 0.
std::vector<double> GatedGradient(Platform& platform, const Inputs& in,
                                  Gate gate);

void CheckStatistics(const Inputs& in, const Results& results);

// Also of Forward, whose own mean and var are taken as given.
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
