// Compares the operations with two normalised inputs, on many shapes, dtypes
// and flags, with plain loops, as kernels_test.cc does for one input.

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/cache.h"
#include "cpu/operations.h"
#include "tests/native/check.h"
#include "tests/native/dual_calls.h"
#include "tests/native/dual_checks.h"
#include "tests/native/operation_checks.h"
#include "tests/native/platform.h"
#include "tests/native/pools.h"

namespace jax_bnar {
namespace testing {
namespace {

void TestShape(const Shape& shape) {
  CallerOnly pool;
  CpuPlatform platform(pool);
  for (const DType dtype : kDTypes) {
    for (const int64_t lead : {0, 1}) {
      const Case c{shape, dtype, lead, lead, /*vectors_by_group=*/lead == 0};
      CheckDualCalls(platform, c, c.Name());
    }
  }
}

void TestShapes() {
  for (const int64_t channels : {1, 3, 65, 251}) {
    for (const int64_t rows : {1, 2, 17, 33}) TestShape({1, rows, channels, 1});
  }
  for (const int64_t channels : {16, 64, 80}) TestShape({1, 37, channels, 1});
  for (const int64_t rows : {129, 300}) TestShape({1, rows, 16, 1});
  TestShape({1, 2100, 3, 1});
  for (const int64_t channels : {528, 1040, 2064}) {
    TestShape({1, 35, channels, 1});
  }
  TestShape({3, 19, 65, 1});
  TestShape({2, 40, 32, 1});
  TestShape({2, 5, 7, 3});
  for (const int64_t inner : {16, 17, 31, 49, 196}) {
    TestShape({1, 3, 5, inner});
    TestShape({2, 2, 3, inner});
  }
  TestShape({1, 2, 3, 2049});
  TestShape({3, 2, 1, 77});
}

// Results too large for the cache bypass it, if their vectors are aligned.
void TestStreaming() {
  for (const DType dtype : kDTypes) {
    const int64_t elements = cpu::kCacheBytes /
                             cpu::ArraysOfStep(/*residual=*/true) /
                             FormatOf(dtype).item_size;
    for (const int64_t lead : {0, 1}) {
      for (const Shape& shape : {Shape{1, elements / 64 + 3, 64, 1},
                                 Shape{1, elements / 65 + 7, 65, 1},
                                 Shape{1, elements / (3 * 256) + 1, 3, 256}}) {
        const Case c{shape, dtype, /*operand_lead=*/1, lead, true};
        QueuePool pool(2);
        CpuPlatform platform(pool);
        CheckDualCalls(platform, c, c.Name() + " streaming");
      }
      if (dtype != DType::kFloat32) break;
    }
  }
}

void TestNumberOfThreads() {
  for (const DType dtype : kDTypes) {
    for (const Shape& shape : {Shape{1, 3001, 65, 1}, Shape{1, 700, 256, 1},
                               Shape{3, 401, 64, 1}, Shape{4, 8, 30, 196}}) {
      const Case c{shape, dtype, 0, 0, true};
      const DualInputs in(c);
      context = c.Name() + " dual threads";
      const auto bytes = [&](cpu::ThreadPool& pool) {
        CpuPlatform platform(pool);
        const DualCalls calls(platform, in);
        std::vector<std::vector<uint8_t>> all;
        const auto add = [&](const DualResults& results) {
          for (const Results* each : {&results.first, &results.second}) {
            for (const auto& array : each->Bytes()) all.push_back(array);
          }
        };
        add(calls.Forward(true, true));
        add(calls.Backward(Gate::kX, true));
        return all;
      };
      CallerOnly caller;
      const auto expected = bytes(caller);
      for (const int64_t threads : {2, 5}) {
        QueuePool pool(threads);
        BNAR_CHECK(bytes(pool) == expected,
                   std::to_string(threads) + " threads change the result");
      }
    }
  }
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  SkipUnlessWantedIsa();
  TestShapes();
  TestStreaming();
  TestNumberOfThreads();
  return Finish();
}
