// Makes all calls with two normalised inputs of one case and checks each
// against its expectation.

#ifndef JAX_BNAR_TESTS_NATIVE_DUAL_CHECKS_H_
#define JAX_BNAR_TESTS_NATIVE_DUAL_CHECKS_H_

#include <string>

#include "tests/native/inputs.h"
#include "tests/native/platform.h"

namespace jax_bnar {
namespace testing {

// `name` says in errors which case it is.
void CheckDualCalls(Platform& platform, const Case& c, const std::string& name);

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_DUAL_CHECKS_H_
