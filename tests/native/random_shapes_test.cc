// Tests the operations with random shapes, dtypes, offsets and activations,
// each against plain loops, and with the same bytes from one thread and from
// several. kernels_test has the shapes that are known to be special.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>

#include "tests/native/calls.h"
#include "tests/native/check.h"
#include "tests/native/expectations.h"
#include "tests/native/inputs.h"
#include "tests/native/operation_checks.h"
#include "tests/native/pools.h"

namespace jax_bnar {
namespace testing {
namespace {

constexpr int kCases = 64;
constexpr int64_t kMostElements = 60000;

// The bounds (inclusive) of groups, rows, channels and inner.
constexpr Shape kKinds[] = {
    {3, 400, 1, 60},   // one channel
    {3, 6, 6000, 3},   // few wide rows
    {3, 300, 150, 1},  // channels last
    {4, 40, 20, 100},  // planes, or rows of short ones
    {1, 4, 5, 6000},   // long planes
    {2, 7000, 9, 1},   // many narrow rows
    {9, 4, 4, 4},      // hardly anything
    {1, 20, 260, 64},  // planes about as long as a vector
};

Shape ShapeFrom(Random& random) {
  const Shape& most =
      kKinds[random.Below(static_cast<int64_t>(std::size(kKinds)))];
  Shape shape{1 + random.Below(most.groups), 1 + random.Below(most.rows),
              1 + random.Below(most.channels), 1 + random.Below(most.inner)};
  while (shape.groups * shape.group_size() > kMostElements) {
    int64_t& longest = std::max(
        {std::ref(shape.rows), std::ref(shape.channels), std::ref(shape.inner)},
        [](int64_t a, int64_t b) { return a < b; });
    longest = (longest + 1) / 2;
  }
  return shape;
}

Case CaseFrom(Random& random) {
  Case c{ShapeFrom(random),
         kDTypes[random.Below(static_cast<int64_t>(std::size(kDTypes)))]};
  c.operand_lead = random.Below(2);
  c.result_lead = random.Below(2);
  c.vectors_by_group = random.Below(2) == 1;
  c.inputs = 1 + static_cast<int>(random.Below(2));
  c.out_dtype = c.dtype;
  const int64_t kind = random.Below(3);
  if (kind == 0) {
    c.activation =
        kCurves[random.Below(static_cast<int64_t>(std::size(kCurves)))];
  } else if (kind == 1 && c.inputs == 1 && ItemSize(c.dtype) == 2) {
    c.out_dtype = DType::kFloat32;
  }
  return c;
}

void CheckThreads(const std::function<Results(Platform&)>& call) {
  CallerOnly caller;
  CpuPlatform alone(caller);
  QueuePool pool(2, 4);
  CpuPlatform together(pool);
  BNAR_CHECK(call(together).Bytes() == call(alone).Bytes(),
             "other bytes from several threads");
}

void TestCase(const Case& c) {
  QueuePool pool(1, 2);
  CpuPlatform platform(pool);
  const Inputs in(c);
  CheckForwardCalls(platform, in, c.Name());
  CheckBackwardCalls(platform, in, c.Name());
  CheckInputsAreUntouched(in, Inputs(c), c.Name());
  context = c.Name();
  CheckThreads([&](Platform& p) {
    return CallForward(p, in, NormaliseOptionsOf(c).front());
  });
  for (const Gate gate : GatesOf(c)) {
    const bool residual = c.inputs == 1 && gate != Gate::kX;
    CheckThreads(
        [&](Platform& p) { return CallBackward(p, in, gate, residual, true); });
  }
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  jax_bnar::testing::SkipUnlessWantedIsa();
  jax_bnar::testing::Random random(2026);
  for (int i = 0; i < jax_bnar::testing::kCases; ++i) {
    jax_bnar::testing::TestCase(jax_bnar::testing::CaseFrom(random));
  }
  return jax_bnar::testing::Finish();
}
