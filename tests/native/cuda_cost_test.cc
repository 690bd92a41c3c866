// Tests what plans are expected to take on devices of different sizes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

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

// Without the spread between blocks, with rows of 64 bytes as fast as others,
// and with half of the first pass left to instructions: numbers that one can
// follow by hand.
cuda::CostModel SimpleModel() {
  cuda::CostModel model;
  model.skew = 0;
  model.narrow_share = 1;
  model.instructions_per_cycle = 2.5;
  return model;
}

// The terms that decide.
void TestCost() {
  context = "cost";
  const auto cost = [](const Shape& shape, Strategy strategy, double barrier) {
    const Problem problem{shape, DType::kBFloat16};
    const int width = cuda::WidthOf(problem, true);
    cuda::CostModel model = SimpleModel();
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
                        device, SimpleModel());
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
  const cuda::CostModel model = SimpleModel();
  const auto waiting = [&](const Plan& plan) {
    return cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays,
                        kHopper, model)
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
  ahead.tiling.tiles_ahead = 4;
  const double rate = cuda::StreamingRate(kHopper, model);
  const double covered = 4 * 4096.0 * ahead.tiling.team / rate;
  const double barrier = model.barrier;
  BNAR_CHECK(
      std::abs(waiting(alone) - 16 * barrier) < 1e-9 &&
          std::abs(waiting(ahead) - 15 * (barrier - covered) - barrier) < 1e-9,
      std::to_string(waiting(ahead)));
  // However many there are, one half of the first pass is left to do: the slab
  // is 12 tiles, of which each block has 6 under way on average.
  ahead.tiling.tiles_ahead = 1000;
  const double share = 1 - 0.08 * 32 / (2 * 6 * 4);
  const double pass = 256.0 * 28 * 28 * 32 * 2 / (rate / 0.92 * share);
  BNAR_CHECK(
      std::abs(waiting(ahead) - 15 * (barrier - pass / 2) - barrier) < 0.05,
      std::to_string(waiting(ahead)));
}

// Tiles that are copied again and again through a ring of slots.
void TestCostOfStream() {
  context = "cost of a stream";
  // A slab of 32 channels has 48 tiles for each of 262 blocks, or 53 MB.
  const Problem problem{{1, 256 * 56 * 56, 256, 1}, DType::kBFloat16};
  const double array = 256.0 * 56 * 56 * 256 * 2;
  cuda::CostModel model = SimpleModel();
  const double barrier = model.barrier;
  const auto cost_of = [&](const Plan& plan) {
    return cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays,
                        kHopper, model);
  };
  const Plan plan = cuda::MakePlan(problem, cuda::kWidth, cuda::kForwardArrays,
                                   kHopper, {Strategy::kOnChip, 0, 32, 12});
  const cuda::Tiling& t = plan.tiling;
  BNAR_CHECK(cuda::TilesPerBlock(t) == 48 && t.team == 262 &&
                 t.shared_tiles == 12 && t.tiles_ahead == 12,
             std::to_string(t.shared_tiles));
  // Of 6 stages of four tiles, a thread waits until 5 are left, uses one and
  // starts one. Of the 3 stages of tiles that stay there, it waits until 2 are
  // left, and 36 tiles are copied again.
  const double first = 24 - 24.0 * 24 / (2 * 48);
  const double second = 12 * 36.0 / 48;
  const double copy = cuda::StreamingRate(kHopper, model) / model.kernel_share;
  const auto share = [](double tiles) {
    return 1 - 0.08 * 32 / (2 * 4 * tiles);
  };
  // 262 of 264 blocks: two multiprocessors have only one.
  const double twice = 130.0 / 132;
  const auto rate = [&](double tiles) {
    return copy * (twice * share(tiles) + (1 - twice) * share(tiles / 2));
  };
  const cuda::Cost cost = cost_of(plan);
  const double expected =
      array / rate(first) + (array + cost.bytes_again) / rate(second);
  // Rows of 64 bytes fill one half of each line of L2.
  const double in_l2 =
      model.share_of_l2 * static_cast<double>(kHopper.l2_bytes) / 2;
  BNAR_CHECK(
      std::abs(cost.streaming - expected) < 0.005 * expected,
      std::to_string(cost.streaming) + " and " + std::to_string(expected));
  BNAR_CHECK(std::abs(cost.bytes_again - 8 * (36 * 4096.0 * 262 - in_l2)) < 1,
             std::to_string(cost.bytes_again));
  // The tiles of the next slab cover each of eight waits but the last, except
  // for a tenth of it.
  BNAR_CHECK(std::abs(cost.waiting - 7 * 0.1 * barrier - barrier) < 1e-9,
             std::to_string(cost.waiting));

  // While one of two teams waits, the other has as much under way as the slots
  // of its blocks hold: five stages.
  const Plan teams = [&] {
    Plan two = plan;
    cuda::SetTeam(131, &two.tiling);
    two.tiling.num_teams = 2;
    two.tiling.tiles_ahead = 0;
    two.tiling.shared_tiles = 20;
    return two;
  }();
  const double others = 20 * 4096.0 * 131 / (copy * model.kernel_share);
  BNAR_CHECK(std::abs(cost_of(teams).waiting -
                      (0.75 * barrier + 4 * (barrier - others))) < 1e-9,
             std::to_string(cost_of(teams).waiting));
  // No round takes more than its wait.
  model.barrier = 0.1;
  BNAR_CHECK(cost_of(teams).waiting <= 4 * 0.1, "covered");
}

// Rows of half a line, and of a quarter, come at a lower rate; where a slab has
// all channels, its rows lie next to each other.
void TestNarrowRows() {
  context = "narrow rows";
  cuda::CostModel model = SimpleModel();
  const auto streaming = [&](const Shape& shape, int channels) {
    const Problem problem{shape, DType::kBFloat16};
    const Plan plan = PlanOf(shape, kHopper, Strategy::kOnChip, false,
                             DType::kBFloat16, channels);
    BNAR_CHECK(plan.tiling.columns == channels, std::to_string(channels));
    return cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays,
                        kHopper, model)
        .streaming;
  };
  // All of it stays on chip, whatever the slabs.
  const Shape small = {1, 256 * 7 * 7, 512, 1};
  const Shape alone = {1, 256 * 28 * 28, 32, 1};
  const double full[] = {streaming(small, 64), streaming(small, 32),
                         streaming(small, 16), streaming(alone, 32)};
  model.narrow_share = 0.8;
  const double narrow[] = {streaming(small, 64), streaming(small, 32),
                           streaming(small, 16), streaming(alone, 32)};
  const double shares[] = {1, 0.8, 0.64, 1};
  for (int i = 0; i < 4; ++i) {
    BNAR_CHECK(std::abs(narrow[i] * shares[i] / full[i] - 1) < 1e-9,
               std::to_string(narrow[i] / full[i]));
  }
}

// What a team waits for beside its messages: its slowest block, and sums in
// double where these are slow.
void TestWaits() {
  context = "waits";
  const Shape shape = {1, 256 * 14 * 14, 1024, 1};
  const Problem problem{shape, DType::kBFloat16};
  const Plan plan =
      PlanOf(shape, kHopper, Strategy::kOnChip, false, DType::kBFloat16, 64);
  cuda::CostModel model = SimpleModel();
  model.idle_if_covered = 1;
  model.idle_with_two_teams = 0;
  const auto cost_on = [&](const Device& device) {
    return cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays,
                        device, model);
  };
  const cuda::Cost even = cost_on(kHopper);
  const auto rounds = static_cast<double>(even.rounds);
  BNAR_CHECK(std::abs(even.waiting - rounds * model.barrier) < 1e-9, "");
  BNAR_CHECK(even.launching == model.cooperative_kernel, "cooperative");
  Device graphics = kHopper;
  graphics.single_to_double_ratio = 64;
  BNAR_CHECK(std::abs(cost_on(graphics).waiting - even.waiting -
                      rounds * 31 * model.double_sums) < 1e-9,
             "32 times as long");
  // The first pass takes about half of the time of the stream, in all rounds.
  model.skew = 0.1;
  const double late = cost_on(kHopper).waiting - even.waiting;
  BNAR_CHECK(0.04 * even.streaming < late && late < 0.06 * even.streaming,
             std::to_string(late));
}

// The plan that loses least whichever model is right, which need not be the
// best plan of any of them.
void TestPlannedModels() {
  context = "planned models";
  const std::vector<cuda::CostModel>& models = cuda::PlannedModels();
  BNAR_CHECK(
      models.size() == 1 + 8 && models[0].barrier == cuda::CostModel().barrier,
      "as assumed, and all ends");
  for (const Shape& shape :
       {Shape{1, 256 * 56 * 56, 256, 1}, Shape{1, 256 * 28 * 28, 128, 1},
        Shape{1, 256 * 28 * 28, 512, 1}, Shape{1, 256 * 14 * 14, 256, 1}}) {
    for (const bool backward : {false, true}) {
      const Problem problem{shape, DType::kBFloat16};
      const int arrays = ArraysKept(backward);
      const auto plan_for = [&](const std::vector<cuda::CostModel>& given) {
        return cuda::MakePlan(problem, cuda::kWidth, arrays, kHopper, {},
                              given);
      };
      std::vector<Plan> plans = {
          cuda::MakePlan(problem, cuda::kWidth, arrays, kHopper, {})};
      for (const cuda::CostModel& model : models) {
        plans.push_back(plan_for({model}));
      }
      std::vector<double> lost(plans.size(), 0);
      for (size_t m = 0; m < models.size(); ++m) {
        const auto total = [&](const Plan& plan) {
          // Reading again counts a trifle more.
          const bool again =
              plan.tiling.shared_tiles < cuda::TilesPerBlock(plan.tiling);
          return (again ? 1.02 : 1) * cuda::CostOf(plan, problem, cuda::kWidth,
                                                   arrays, kHopper, models[m])
                                          .total();
        };
        const double best = total(plans[m + 1]);
        for (size_t i = 0; i < plans.size(); ++i) {
          lost[i] = std::max(lost[i], total(plans[i]) - best);
        }
      }
      for (const double other : lost) {
        BNAR_CHECK(
            lost[0] <= other + 1e-9,
            std::to_string(lost[0]) + " us, not " + std::to_string(other));
      }
    }
  }
}

// A plan copies either all tiles of a slab, or has room for two stages.
void TestRoomOfStream() {
  context = "room of a stream";
  for (const int tiles : {4, 7, 8}) {
    Device device = kHopper;
    device.shared_bytes_per_block = cuda::kFixedSharedBytes + tiles * 4096;
    const Problem problem{{1, 256 * 56 * 56, 64, 1}, DType::kBFloat16};
    const Plan plan =
        cuda::MakePlan(problem, cuda::kWidth, cuda::kForwardArrays, device,
                       {Strategy::kOnChip});
    BNAR_CHECK((plan.strategy == Strategy::kOnChip) == (tiles == 8),
               std::to_string(tiles) + " tiles");
    // Fewer tiles than a stage.
    const Problem small{{1, 256 * 7, 64, 1}, DType::kBFloat16};
    BNAR_CHECK(cuda::MakePlan(small, cuda::kWidth, cuda::kForwardArrays, device,
                              {Strategy::kOnChip})
                       .strategy == Strategy::kOnChip,
               "a slab that fits");
  }
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
  TestCostOfStream();
  TestNarrowRows();
  TestWaits();
  TestPlannedModels();
  TestRoomOfStream();
  return Finish();
}
