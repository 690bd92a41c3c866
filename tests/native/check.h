// A check that reports where and in which case it failed, and continues.

#ifndef JAX_BNAR_TESTS_NATIVE_CHECK_H_
#define JAX_BNAR_TESTS_NATIVE_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cpu/dispatch.h"

namespace jax_bnar {
namespace testing {

// The exit status that CTest counts as skipped (SKIP_RETURN_CODE).
constexpr int kSkipped = 77;
// A wrong kernel fails in every case, so the first reports are enough.
constexpr int kMaxReports = 20;

inline int failures = 0;
// Describes what is being tested, for the report.
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

// `detail` is evaluated only on failure.
#define BNAR_CHECK(condition, detail)                                    \
  do {                                                                   \
    if (!(condition)) {                                                  \
      ::jax_bnar::testing::ReportFailure(__FILE__, __LINE__, #condition, \
                                         (detail));                      \
    }                                                                    \
  } while (false)

// Prints the outcome and returns the exit status of the program.
inline int Finish() {
  std::printf("%s\n", failures == 0 ? "passed" : "FAILED");
  return failures == 0 ? 0 : 1;
}

// Skips the program if the processor lacks the instruction set requested by
// JAX_BNAR_CPU_ISA: it would test other kernels a second time.
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
