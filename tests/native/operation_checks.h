// Makes all calls of one case and checks each against its expectation.

#ifndef JAX_BNAR_TESTS_NATIVE_OPERATION_CHECKS_H_
#define JAX_BNAR_TESTS_NATIVE_OPERATION_CHECKS_H_

#include <string>
#include <vector>

#include "tests/native/calls.h"
#include "tests/native/inputs.h"
#include "tests/native/platform.h"

namespace jax_bnar {
namespace testing {

constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                             DType::kFloat64};
inline std::vector<Gate> GatesOf(const Case& c) {
  if (!c.activation.is_piecewise_linear()) {
    if (c.inputs > 1) return {Gate::kX};
    return {Gate::kX, Gate::kZ};
  }
  if (c.activation.is_curve()) return {Gate::kY, Gate::kMask, Gate::kX};
  return {Gate::kNone, Gate::kY, Gate::kMask, Gate::kX};
}
// Two inputs have no residual.
inline std::vector<NormaliseOptions> NormaliseOptionsOf(const Case& c) {
  if (!c.activation.is_piecewise_linear()) {
    return {{true, c.inputs == 1, false, true}, {true, false, false, false}};
  }
  if (c.activation.is_curve() && c.inputs == 1) {
    return {{true, true, true, true},
            {true, true, false, false},
            {true, false, true, false},
            {true, false, false, true}};
  }
  if (c.inputs > 1) {
    return {{true, false, true, true},
            {true, false, false, true},
            {true, false, true, false},
            {true, false, false, false},
            {false, false, false, true}};
  }
  return {{true, true, true, true},    {true, true, false, true},
          {true, false, true, true},   {true, false, false, false},
          {false, true, false, false}, {false, false, false, true}};
}

// All operations, or only the whole passes (Forward and Backward).
enum class Calls { kAll, kWholePasses };

void CheckForwardCalls(Platform& platform, const Inputs& in,
                       const std::string& name, Calls calls = Calls::kAll);

void CheckBackwardCalls(Platform& platform, const Inputs& in,
                        const std::string& name, Calls calls = Calls::kAll);

// `same` are newly made inputs of the same case.
void CheckInputsAreUntouched(const Inputs& in, const Inputs& same,
                             const std::string& name);

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_OPERATION_CHECKS_H_
