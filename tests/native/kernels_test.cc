// Tests the operations with many shapes, dtypes and flags against plain loops,
// on operands that end where their memory ends, and checks that results have
// the same bytes for any number of threads.
//
// Argument: how many inputs are normalised, 1 or 2.

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cpu/cache.h"
#include "tests/native/calls.h"
#include "tests/native/check.h"
#include "tests/native/expectations.h"
#include "tests/native/inputs.h"
#include "tests/native/operation_checks.h"
#include "tests/native/pools.h"

namespace jax_bnar {
namespace testing {
namespace {

// Those of x and of y.
struct DTypes {
  DType x;
  DType y;
};

std::vector<DTypes> SameDTypes() {
  std::vector<DTypes> all;
  for (const DType dtype : kDTypes) all.push_back({dtype, dtype});
  return all;
}

// One input may have float32 outputs with 16-bit x. For arrays that are aligned
// and for others this is one of the two pairs each, because these tests take
// most of their time in emulators and under sanitizers.
std::vector<DTypes> DTypesOf(int inputs, int64_t lead) {
  std::vector<DTypes> all = SameDTypes();
  const DType narrow = lead == 0 ? DType::kBFloat16 : DType::kFloat16;
  if (inputs == 1) all.push_back({narrow, DType::kFloat32});
  return all;
}

// Other activations than ReLU, for rows and planes of a few sizes: rows with a
// tail, wide rows, planes with ragged ends, and planes of more than one strip.
// curves_test has the functions themselves.
void TestCurves() {
  CallerOnly pool;
  CpuPlatform platform(pool);
  for (const Activation& activation : kCurves) {
    for (const DType dtype : kDTypes) {
      for (const Shape& shape :
           {Shape{1, 35, 65, 1}, Shape{2, 40, 48, 1}, Shape{1, 5, 2085, 1},
            Shape{2, 3, 5, 49}, Shape{1, 9, 3, 6}, Shape{1, 2, 3, 2501},
            Shape{1, 2, 3, 2053}}) {
        for (const int inputs : {1, 2}) {
          Case c{shape, dtype, 0, 0, true, 0, inputs};
          c.activation = activation;
          const Inputs in(c);
          CheckForwardCalls(platform, in, c.Name());
          CheckBackwardCalls(platform, in, c.Name());
          CheckInputsAreUntouched(in, Inputs(c), c.Name());
        }
      }
    }
  }
}

void TestShape(const Shape& shape, int inputs = 1) {
  CallerOnly pool;
  CpuPlatform platform(pool);
  for (const int64_t lead : {0, 1}) {
    for (const DTypes& dtypes : DTypesOf(inputs, lead)) {
      const Case c{shape,
                   dtypes.x,
                   lead,
                   lead,
                   /*vectors_by_group=*/lead == 0,
                   /*mask_channels=*/0,
                   inputs,
                   dtypes.y};
      const Inputs in(c);
      CheckForwardCalls(platform, in, c.Name());
      CheckBackwardCalls(platform, in, c.Name());
      CheckInputsAreUntouched(in, Inputs(c), c.Name());
    }
  }
}

void TestRowsLayout() {
  // Rows of odd widths are joined; these cover every remainder of the rows.
  for (const int64_t channels : {1, 3, 7, 65, 251}) {
    for (const int64_t rows : {1, 2, 15, 16, 17, 33}) {
      TestShape({1, rows, channels, 1});
    }
  }
  for (const int64_t channels : {2, 8, 16, 24, 48, 64, 80}) {
    TestShape({1, 37, channels, 1});
  }
  // Blocks of 32 and chunks of 128 rows.
  for (const int64_t rows : {31, 32, 33, 127, 128, 129, 300}) {
    TestShape({1, rows, 16, 1});
  }
  TestShape({1, 2100, 3, 1});  // more than 16 rows joined
  // Slabs of 512 columns, and sums of 1024 at a time.
  for (const int64_t channels : {528, 1024, 1040, 2064}) {
    TestShape({1, 35, channels, 1});
  }
  TestShape({1, 17, 1027, 1});
  for (const int64_t groups : {2, 3}) {
    TestShape({groups, 5, 3, 1});
    TestShape({groups, 19, 65, 1});
    TestShape({groups, 40, 32, 1});
  }
}

void TestShortPlanes() {
  for (int64_t inner = 2; inner < 16; ++inner) {
    TestShape({1, 5, 3, inner});
    TestShape({1, 37, 7, inner});
    TestShape({2, 3, 16, inner});
  }
  // Longer ones are columns as well if there are many rows.
  for (const int64_t inner : {16, 23, 39}) TestShape({1, 17, 5, inner});
  TestShape({2, 35, 3, 36});
}

void TestPlanesLayout() {
  for (const int64_t inner : {16, 17, 23, 31, 32, 33, 49, 64, 100, 196, 300}) {
    TestShape({1, 1, 2, inner});
    TestShape({1, 3, 5, inner});
    TestShape({2, 2, 3, inner});
  }
  TestShape({1, 9, 16, 49});
  // Segments of 2048 elements.
  for (const int64_t inner : {2047, 2048, 2049, 4113}) {
    TestShape({1, 2, 3, inner});
  }
  // With one channel, planes form one run.
  TestShape({1, 3, 1, 300});
  TestShape({3, 2, 1, 77});
}

// Fewer of each kind, because what differs from one input is how a row and a
// plane are computed, and not how they are divided.
void TestTwoInputs() {
  for (const int64_t channels : {1, 3, 65, 251}) {
    for (const int64_t rows : {1, 2, 17, 33}) {
      TestShape({1, rows, channels, 1}, 2);
    }
  }
  for (const int64_t channels : {16, 64, 80}) {
    TestShape({1, 37, channels, 1}, 2);
  }
  for (const int64_t rows : {129, 300}) TestShape({1, rows, 16, 1}, 2);
  TestShape({1, 2100, 3, 1}, 2);
  for (const int64_t channels : {528, 1040, 2064}) {
    TestShape({1, 35, channels, 1}, 2);
  }
  TestShape({3, 19, 65, 1}, 2);
  TestShape({2, 40, 32, 1}, 2);
  TestShape({2, 5, 7, 3}, 2);
  for (const int64_t inner : {16, 17, 31, 49, 196}) {
    TestShape({1, 3, 5, inner}, 2);
    TestShape({2, 2, 3, inner}, 2);
  }
  TestShape({1, 2, 3, 2049}, 2);
  TestShape({3, 2, 1, 77}, 2);
}

void TestStreamingCase(Case c) {
  QueuePool pool(2);
  CpuPlatform platform(pool);
  const Inputs in(c);
  const NormaliseOptions options =
      NormaliseOptionsOf(c)[c.result_lead == 0 ? 0 : 1];
  context = c.Name() + " streaming forward";
  const Results forward = CallForward(platform, in, options);
  CheckStatistics(in, forward);
  CheckNormalised(in, options, forward);
  context = c.Name() + " streaming backward";
  for (const Gate gate : {Gate::kNone, Gate::kX, Gate::kMask, Gate::kY}) {
    const bool residual = gate != Gate::kX && c.inputs == 1;
    CheckBackward(in, GatedGradientOf(platform, in, gate), true,
                  CallBackward(platform, in, gate, residual, true));
  }
}

// Results that are too large for the cache bypass it if they are aligned.
void TestStreaming(int inputs) {
  for (const DTypes& dtypes : DTypesOf(inputs, /*lead=*/0)) {
    const auto test = [&](const Shape& shape, int64_t operand_lead,
                          int64_t result_lead) {
      TestStreamingCase({shape, dtypes.x, operand_lead, result_lead, true,
                         /*mask_channels=*/0, inputs, dtypes.y});
    };
    const int64_t elements =
        cpu::kCacheBytes / cpu::BytesOfStep(inputs, /*residual=*/false,
                                            FormatOf(dtypes.x).item_size,
                                            FormatOf(dtypes.y).item_size);
    const Shape aligned[] = {
        {1, elements / 64 + 3, 64, 1},
        {1, elements / 65 + 7, 65, 1},
        {2, elements / 2 / 48 + 1, 48, 1},
        {1, elements / (3 * 272) + 1, 3, 272},
    };
    for (const Shape& shape : aligned) test(shape, 1, 0);
    // Aligned to half a vector.
    test(aligned[0], 0, 8);
    if (dtypes.y != DType::kFloat32) continue;
    // Too large for backward to read dy and y again instead of dz.
    test({1, elements * 3 / 2 / 64, 64, 1}, 0, 0);
    // The second group, or the second plane, is not aligned.
    test({2, elements / 2 / 33 + 2, 33, 1}, 0, 0);
    test({1, elements / (5 * 196) + 1, 5, 196}, 0, 0);
  }
}

void CheckSameForAnyNumberOfThreads(
    const std::function<Results(Platform&)>& call) {
  CallerOnly caller;
  CpuPlatform one(caller);
  const auto expected = call(one).Bytes();
  for (const int64_t threads : {2, 5}) {
    QueuePool pool(threads);
    CpuPlatform platform(pool);
    BNAR_CHECK(call(platform).Bytes() == expected,
               std::to_string(threads) + " threads change the result");
  }
}

void TestNumberOfThreads(int inputs) {
  const Shape shapes[] = {
      {1, 3001, 65, 1}, {1, 700, 256, 1}, {1, 65, 3000, 1},
      {3, 401, 64, 1},  {2, 501, 33, 7},  {4, 8, 30, 196},
  };
  for (const DTypes& dtypes : SameDTypes()) {
    for (const Shape& shape : shapes) {
      const Case c{shape,  dtypes.x, 0, 0, true, /*mask_channels=*/0,
                   inputs, dtypes.y};
      const Inputs in(c);
      context = c.Name() + " threads";
      CheckSameForAnyNumberOfThreads(
          [&](Platform& platform) { return CallStatistics(platform, in); });
      CheckSameForAnyNumberOfThreads([&](Platform& platform) {
        return CallForward(platform, in, NormaliseOptionsOf(c)[0]);
      });
      for (const Gate gate : GatesOf(c)) {
        const bool residual = gate != Gate::kX && inputs == 1;
        CheckSameForAnyNumberOfThreads([&](Platform& platform) {
          return CallReduce(platform, in, gate, residual);
        });
        CheckSameForAnyNumberOfThreads([&](Platform& platform) {
          return CallBackward(platform, in, gate, residual, true);
        });
      }
    }
  }
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main(int argc, char** argv) {
  using namespace jax_bnar::testing;
  const int inputs = argc > 1 ? std::atoi(argv[1]) : 1;
  SkipUnlessWantedIsa();
  if (inputs == 1) {
    TestRowsLayout();
    TestShortPlanes();
    TestPlanesLayout();
    TestCurves();
  } else {
    TestTwoInputs();
  }
  TestStreaming(inputs);
  TestNumberOfThreads(inputs);
  return Finish();
}
