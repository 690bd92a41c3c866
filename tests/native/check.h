// A check that reports where and in which case it failed, and goes on.

#ifndef JAX_BNAR_TESTS_NATIVE_CHECK_H_
#define JAX_BNAR_TESTS_NATIVE_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cpu/dispatch.h"

namespace jax_bnar {
namespace testing {

// What CTest counts as skipped (SKIP_RETURN_CODE).
constexpr int kSkipped = 77;
// One wrong kernel fails in every case: the first ones say enough.
constexpr int kMaxReports = 20;

inline int failures = 0;
// What is under test, for the report.
inline std::string context;

inline void ReportFailure(const char* file, int line, const char* condition,
                          const std::string& detail) {
  ++failures;
  std::fprintf(stderr, "%s:%d: %s is false%s%s [%s]\n", file, line, condition,
               detail.empty() ? "" : ": ", detail.c_str(), context.c_str());
  if (failures == kMaxReports) {
    std::fprintf(stderr, "more failures are not listed\n");
    std::exit(1);
  }
}

// `detail` is evaluated on failure only.
#define BNAR_CHECK(condition, detail)                                    \
  do {                                                                   \
    if (!(condition)) {                                                  \
      ::jax_bnar::testing::ReportFailure(__FILE__, __LINE__, #condition, \
                                         (detail));                      \
    }                                                                    \
  } while (false)

// The exit status of the program.
inline int Finish() {
  std::printf("%s\n", failures == 0 ? "passed" : "FAILED");
  return failures == 0 ? 0 : 1;
}

// Skips the program where the processor lacks what JAX_BNAR_CPU_ISA asks for:
// it would test the same kernels twice.
inline void SkipUnlessWantedIsa() {
  const char* wanted = std::getenv("JAX_BNAR_CPU_ISA");
  std::printf("kernels: %s\n", cpu::IsaName());
  if (wanted != nullptr && std::strcmp(wanted, cpu::IsaName()) != 0) {
    std::printf("skipped: this processor does not run %s\n", wanted);
    std::exit(kSkipped);
  }
}

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_CHECK_H_
