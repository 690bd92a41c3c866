// Tests what plans are expected to take on devices of different sizes.

#include <cmath>
#include <cstdint>
#include <string>

#include "cuda/host/cost.h"
#include "cuda/host/parameters.h"
#include "cuda/host/plan.h"
#include "cuda/host/tiling.h"
#include "tests/native/check.h"
#include "tests/native/cuda_devices.h"

namespace jax_bnar {
namespace testing {
namespace {

using cuda::Device;
using cuda::Plan;
using cuda::Strategy;

// The terms that decide.
void TestCost() {
  context = "cost";
  const auto cost = [](const Shape& shape, Strategy strategy, double barrier) {
    const Problem problem{shape, DType::kBFloat16};
    const int width = cuda::WidthOf(problem, true);
    cuda::CostModel model;
    model.barrier = barrier;
    return cuda::CostOf(PlanOf(shape, kHopper, strategy), problem, width,
                        cuda::kForwardArrays, kHopper, model);
  };
  const Shape stem = {1, 256 * 112 * 112, 64, 1};
  const Shape middle = {1, 256 * 14 * 14, 1024, 1};
  const double middle_bytes = 256.0 * 14 * 14 * 1024 * 2;
  const double stem_bytes = 256.0 * 112 * 112 * 64 * 2;

  const cuda::Cost on_chip = cost(middle, Strategy::kOnChip, 3);
  BNAR_CHECK(on_chip.bytes_again == 0 && on_chip.bytes == 2 * middle_bytes,
             "read once, written once");
  // Four teams take four slabs each; while one waits, memory is busy with what
  // the others have asked for, except for the ends and a tenth.
  BNAR_CHECK(on_chip.rounds == 4 &&
                 std::abs(on_chip.waiting - 3 * (0.75 + 4 * 0.1)) < 1e-9,
             "four rounds");
  BNAR_CHECK(on_chip.in_flight == 1, "two blocks to a multiprocessor");
  const cuda::Cost two = cost(middle, Strategy::kTwoKernels, 3);
  BNAR_CHECK(two.bytes_again > 0 && two.bytes_again < middle_bytes,
             "L2 has a part of what is read again");
  BNAR_CHECK(on_chip.total() < two.total() &&
                 cost(middle, Strategy::kOnChip, 30).total() > two.total(),
             "one number decides");
  const cuda::Cost again = cost(stem, Strategy::kOnChip, 3);
  BNAR_CHECK(again.bytes_again > stem_bytes / 2 &&
                 again.bytes_again < stem_bytes &&
                 again.bytes == 2 * stem_bytes + again.bytes_again,
             "what fits neither the chip nor L2");

  // Half of the blocks have half of the loads in flight.
  const Problem problem{{1, 256 * 7 * 7, 512, 1}, DType::kBFloat16};
  Plan plan = PlanOf(problem.shape, kHopper, Strategy::kOnChip);
  plan.grid = 132;
  const cuda::Cost half =
      cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays, kHopper);
  BNAR_CHECK(half.in_flight > 0.6 && half.in_flight < 0.7,
             std::to_string(half.in_flight));
}

// What forward and backward of each form move, and what their masks cost.
void TestTraffic() {
  context = "traffic";
  const DType half = DType::kBFloat16;
  const cuda::Traffic forward = cuda::ForwardTraffic(half, true, true);
  BNAR_CHECK(forward.arrays_kept == 1 && forward.first == 0 &&
                 forward.second == 2 + 1.0 / 16 && forward.again == 1,
             "x; z, y and the mask");
  const cuda::Traffic dz = cuda::BackwardTraffic(half, Gate::kY, true);
  BNAR_CHECK(
      dz.arrays_kept == 2 && dz.first == 2 && dz.second == 1 && dz.again == 2,
      "dy and x, y and dz; dx; dz and x again");
  const cuda::Traffic y = cuda::BackwardTraffic(half, Gate::kY, false);
  BNAR_CHECK(y.first == 1 && y.again == 3, "without dz, y is read again");
  BNAR_CHECK(cuda::BackwardTraffic(DType::kFloat32, Gate::kMask, false).first ==
                 1.0 / 32,
             "a mask beside float32");

  // In the order of the elements, two slabs of 64 channels in turn have 8 of
  // the 32 bytes of a sector each: it is written and read again four times, and
  // read once in addition.
  Plan plan = PlanOf({1, 256 * 56 * 56, 256, 1}, kHopper, Strategy::kOnChip,
                     false, half, 64);
  BNAR_CHECK(plan.tiling.num_teams == 1, "one team");
  const Problem problem{plan.tiling.shape, half};
  const double array = 2.0 * 256 * 56 * 56 * 256;
  const auto sectors = [&](const cuda::Traffic& traffic) {
    return cuda::CostOf(plan, problem, cuda::kWidth, traffic, kHopper)
               .bytes_of_sectors /
           array;
  };
  BNAR_CHECK(sectors(cuda::ForwardTraffic(half, true, true)) == 7.0 / 16, "");
  BNAR_CHECK(
      sectors(cuda::BackwardTraffic(half, Gate::kMask, true)) == 3.0 / 16, "");
  BNAR_CHECK(sectors(cuda::ForwardTraffic(half, true, false)) == 0, "no mask");
}

// Devices differ in bandwidth, and so in what a barrier is worth.
void TestBandwidth() {
  context = "bandwidth";
  Device slow = kHopper;
  slow.memory_bytes_per_microsecond = 300e3;
  const Problem problem{{1, 256 * 14 * 14, 1024, 1}, DType::kBFloat16};
  const Plan plan = PlanOf(problem.shape, kHopper);
  const auto cost = [&](const Device& device) {
    return cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays,
                        device);
  };
  // If it is unknown, that of an H200 is assumed.
  const double ratio = cost(slow).streaming / cost(kHopper).streaming;
  BNAR_CHECK(std::abs(ratio - 4917.0 / 300) < 1e-6, std::to_string(ratio));
  BNAR_CHECK(cost(slow).waiting == cost(kHopper).waiting, "latencies");
}

// Tiles that are on their way while blocks wait cover the wait of a single
// team.
void TestCostOfTilesAhead() {
  context = "cost of tiles ahead";
  const Problem problem{{1, 256 * 28 * 28, 512, 1}, DType::kBFloat16};
  const auto waiting = [&](const Plan& plan) {
    return cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays,
                        kHopper)
        .waiting;
  };
  Plan alone = cuda::MakePlan(problem, cuda::kWidth, cuda::kForwardArrays,
                              kHopper, {Strategy::kOnChip, 0, 32, 0});
  Plan ahead = alone;
  for (Plan* plan : {&alone, &ahead}) {
    cuda::SetTeam(264, &plan->tiling);
    plan->tiling.num_teams = 1;
    plan->tiling.shared_tiles = 12;
  }
  ahead.tiling.prefetch_tiles = 4;
  const double rate = cuda::StreamingRate(kHopper, cuda::CostModel());
  const double covered = 4 * 4096.0 * ahead.tiling.team / rate;
  const double barrier = cuda::CostModel().barrier;
  BNAR_CHECK(std::abs(waiting(alone) - 16 * barrier) < 1e-9 &&
                 std::abs(waiting(ahead) - 16 * (barrier - covered)) < 1e-9,
             std::to_string(waiting(ahead)));
  ahead.tiling.prefetch_tiles = 1000;
  BNAR_CHECK(std::abs(waiting(ahead) - 16 * barrier * 0.1) < 1e-9,
             "all but a tenth");
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  TestCost();
  TestTraffic();
  TestBandwidth();
  TestCostOfTilesAhead();
  return Finish();
}
