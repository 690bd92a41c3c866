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

// Without the spread between blocks, with narrow rows as fast as others, and
// with a barrier that takes as long for any number of columns: numbers that one
// can follow by hand.
cuda::CostModel SimpleModel() {
  cuda::CostModel model;
  model.skew = 0;
  model.line_share = 1;
  model.narrow_share = 1;
  model.barrier_of_column = 0;
  model.barrier_of_turn = 0;
  return model;
}

bool Near(double a, double b) {
  return std::abs(a - b) <= 1e-9 * std::max(std::abs(a), std::abs(b));
}

// The rate of a copy in bytes a microsecond, on kHopper, which does not report
// its bandwidth: that of an H200 is assumed.
double CopyRate(const cuda::CostModel& model) {
  return 4814e3 * model.copy_share;
}

// The rate if two blocks on each multiprocessor load into registers.
double LoadingRate(const cuda::CostModel& model) {
  return CopyRate(model) * model.kernel_share;
}

// The share of a copy's rate if each of two blocks has so many tiles of 4 KiB
// in flight: 14 % are missing with 32 KiB, and half as much with twice as much.
double ShareWith(double tiles) { return 1 - 0.14 * 32 / (2 * 4 * tiles); }

// The terms that decide.
void TestCost() {
  context = "cost";
  const auto cost = [](const Plan& plan, double barrier) {
    cuda::CostModel model = SimpleModel();
    model.barrier = barrier;
    return cuda::CostOf(plan, {plan.tiling.shape, DType::kBFloat16},
                        cuda::kWidth, cuda::kForwardArrays, kHopper, model);
  };
  const Shape stem = {1, 256 * 112 * 112, 64, 1};
  const Shape middle = {1, 256 * 14 * 14, 1024, 1};
  const double middle_bytes = 256.0 * 14 * 14 * 1024 * 2;
  const double stem_bytes = 256.0 * 112 * 112 * 64 * 2;

  // Four teams take four slabs of 1568 tiles each: 66 blocks have 24 of them,
  // or 23, and room for 24.
  const Plan teams = PlanOf(middle, kHopper, Strategy::kOnChip, false,
                            DType::kBFloat16, 64, 4);
  const cuda::Cost on_chip = cost(teams, 3);
  BNAR_CHECK(on_chip.bytes_again == 0 && on_chip.bytes == 2 * middle_bytes,
             "read once, written once");
  BNAR_CHECK(on_chip.rounds == 4 && Near(on_chip.waiting, 4 * 3.0),
             "four rounds");
  BNAR_CHECK(on_chip.in_flight == 1, "two blocks to a multiprocessor");
  // Copies of a slab begin at once, so that one half of its tiles is under way
  // on average. In the second pass there are none.
  const cuda::CostModel model = SimpleModel();
  BNAR_CHECK(
      Near(on_chip.streaming, middle_bytes / (CopyRate(model) * ShareWith(12)) +
                                  middle_bytes / LoadingRate(model)),
      std::to_string(on_chip.streaming));
  const Plan two_kernels = PlanOf(middle, kHopper, Strategy::kTwoKernels);
  const cuda::Cost two = cost(two_kernels, 3);
  BNAR_CHECK(two.bytes_again > 0 && two.bytes_again < middle_bytes,
             "L2 has a part of what is read again");
  BNAR_CHECK(on_chip.total() < two.total() &&
                 cost(teams, 30).total() > cost(two_kernels, 30).total(),
             "one number decides");
  const cuda::Cost again = cost(PlanOf(stem, kHopper, Strategy::kOnChip), 3);
  BNAR_CHECK(again.bytes_again > stem_bytes / 2 &&
                 again.bytes_again < stem_bytes &&
                 again.bytes == 2 * stem_bytes + again.bytes_again,
             "what fits neither the chip nor L2");

  // Half of the blocks have half of the loads in flight: 16 KiB of the 19 KB
  // that a multiprocessor needs for its share of 4.2 TB/s during 0.6 us.
  const Problem problem{{1, 256 * 7 * 7, 512, 1}, DType::kBFloat16};
  Plan plan = PlanOf(problem.shape, kHopper, Strategy::kOnChip);
  plan.grid = 132;
  const cuda::Cost half =
      cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays, kHopper);
  const double needed = 4814e3 * 0.855 * 0.6 / 132;
  BNAR_CHECK(Near(half.in_flight, 16384 / needed),
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

  // One team takes slabs of 64 channels in turn. In the order of the elements,
  // each slab has 8 of the 32 bytes of a sector: it is written and read again
  // four times, and read once in addition. If the bits of 128 channels lie
  // together, each slab has half of them.
  const Plan plan = PlanOf({1, 256 * 56 * 56, 256, 1}, kHopper,
                           Strategy::kOnChip, false, half, 64, 1);
  BNAR_CHECK(plan.tiling.num_teams == 1, "one team");
  const double array = 2.0 * 256 * 56 * 56 * 256;
  const auto sectors = [&](const cuda::Traffic& moved, int64_t mask_channels,
                           int32_t teams) {
    Plan with = plan;
    with.tiling.mask_channels = mask_channels;
    with.tiling.num_teams = teams;
    return cuda::CostOf(with, {plan.tiling.shape, half, mask_channels},
                        cuda::kWidth, moved, kHopper)
               .bytes_of_sectors /
           array;
  };
  const cuda::Traffic written = cuda::ForwardTraffic(half, true, true);
  const cuda::Traffic read = cuda::BackwardTraffic(half, Gate::kMask, true);
  BNAR_CHECK(plan.tiling.mask_channels == 256, "the order of the elements");
  BNAR_CHECK(sectors(written, 256, 1) == 7.0 / 16, "");
  BNAR_CHECK(sectors(read, 256, 1) == 3.0 / 16, "");
  BNAR_CHECK(sectors(written, 128, 1) == 3.0 / 16, "");
  BNAR_CHECK(sectors(read, 128, 1) == 1.0 / 16, "");
  BNAR_CHECK(sectors(written, 64, 1) == 0, "sectors of one slab");
  BNAR_CHECK(sectors(written, 128, 2) == 0, "both halves at once");
  BNAR_CHECK(sectors(written, 256, 4) == 0, "all slabs at once");
  BNAR_CHECK(sectors(cuda::ForwardTraffic(half, true, false), 256, 1) == 0,
             "no mask");
}

// Devices differ in bandwidth, and so in what a barrier is worth.
void TestBandwidth() {
  context = "bandwidth";
  Device slow = kHopper;
  slow.memory_bytes_per_microsecond = 300e3;
  const Problem problem{{1, 256 * 14 * 14, 1024, 1}, DType::kBFloat16};
  const Plan plan = PlanOf(problem.shape, kHopper, Strategy::kOnChip, false,
                           DType::kBFloat16, 64, 4);
  const auto cost = [&](const Device& device) {
    return cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays,
                        device, SimpleModel());
  };
  // If it is unknown, that of an H200 is assumed.
  const double ratio = cost(slow).streaming / cost(kHopper).streaming;
  BNAR_CHECK(std::abs(ratio - 4814.0 / 300) < 1e-6, std::to_string(ratio));
  BNAR_CHECK(cost(slow).waiting == cost(kHopper).waiting, "latencies");
}

// Tiles that are copied again and again through a ring of slots.
void TestCostOfStream() {
  context = "cost of a stream";
  // A slab of 32 channels has 12544 tiles: 48, or 47, for each of 264 blocks.
  const Problem problem{{1, 256 * 56 * 56, 256, 1}, DType::kBFloat16};
  const double array = 256.0 * 56 * 56 * 256 * 2;
  const cuda::CostModel model = SimpleModel();
  Plan plan = PlanOf(problem.shape, kHopper, Strategy::kOnChip, false,
                     DType::kBFloat16, 32, 1);
  BNAR_CHECK(plan.tiling.tiles_per_block == 48 && plan.grid == 264 &&
                 plan.tiling.shared_tiles == 24,
             std::to_string(plan.tiling.shared_tiles));
  struct Expected {
    int slots;
    // The tiles under way, on average.
    double first, second;
  };
  // Of 6 stages of four tiles, a thread waits until 5 are left, uses one and
  // starts one: 24 tiles are under way, until the last 24 are. In the second
  // pass, while 24 tiles are copied again, it is as many. Of 3 stages, 12 tiles
  // are, and 36 are copied again. Of 8 stages, a thread also waits until 5 are
  // left.
  for (const Expected& expected :
       {Expected{24, 24 - 24.0 * 24 / (2 * 48), 24 * 24.0 / 48},
        Expected{12, 12 - 12.0 * 12 / (2 * 48), 12 * 36.0 / 48},
        Expected{32, 24 - 24.0 * 24 / (2 * 48), 24 * 16.0 / 48}}) {
    plan.tiling.shared_tiles = expected.slots;
    const cuda::Cost cost = cuda::CostOf(plan, problem, cuda::kWidth,
                                         cuda::kForwardArrays, kHopper, model);
    // Rows of 64 bytes fill one half of each line of L2.
    const double in_l2 =
        model.share_of_l2 * static_cast<double>(kHopper.l2_bytes) / 2;
    const double again = (48 - expected.slots) * 4096.0 * 264;
    BNAR_CHECK(Near(cost.bytes_again, 8 * (again - in_l2)),
               std::to_string(cost.bytes_again));
    const double time = array / (CopyRate(model) * ShareWith(expected.first)) +
                        (array + cost.bytes_again) /
                            (CopyRate(model) * ShareWith(expected.second));
    BNAR_CHECK(Near(cost.streaming, time),
               std::to_string(cost.streaming) + " and " + std::to_string(time));
    BNAR_CHECK(cost.rounds == 8 && Near(cost.waiting, 8 * model.barrier),
               std::to_string(cost.waiting));
  }
  // Rows of 128 bytes and of 256 fill whole lines: 96 and 191 tiles, of which
  // 24 stay.
  for (const int columns : {64, 128}) {
    const Plan wide = PlanOf(problem.shape, kHopper, Strategy::kOnChip, false,
                             DType::kBFloat16, columns, 1);
    const int64_t tiles = columns == 64 ? 96 : 192;  // in whole stages
    const double again = static_cast<double>(tiles - 24) * 4096 * 264;
    const double in_l2 =
        model.share_of_l2 * static_cast<double>(kHopper.l2_bytes);
    const cuda::Cost cost = cuda::CostOf(wide, problem, cuda::kWidth,
                                         cuda::kForwardArrays, kHopper, model);
    BNAR_CHECK(Near(cost.bytes_again, 256.0 / columns * (again - in_l2)),
               std::to_string(cost.bytes_again));
  }
}

// Rows of one line come at a lower rate than longer ones, and those of half a
// line and of a quarter at a still lower one; where a slab has all channels,
// its rows lie next to each other.
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
  const auto all = [&] {
    return std::vector<double>{streaming(small, 256), streaming(small, 128),
                               streaming(small, 64),  streaming(small, 32),
                               streaming(small, 16),  streaming(alone, 32)};
  };
  const std::vector<double> full = all();
  model.line_share = 0.9;
  model.narrow_share = 0.8;
  const std::vector<double> narrow = all();
  const double shares[] = {1, 1, 0.9, 0.8, 0.64, 1};
  for (size_t i = 0; i < full.size(); ++i) {
    BNAR_CHECK(Near(narrow[i] * shares[i], full[i]),
               std::to_string(narrow[i] / full[i]));
  }
}

// What a team waits for: its messages, its slowest block, and sums in double
// where these are slow.
void TestWaits() {
  context = "waits";
  const Shape shape = {1, 256 * 14 * 14, 1024, 1};
  const Problem problem{shape, DType::kBFloat16};
  const double array = 256.0 * 14 * 14 * 1024 * 2;
  cuda::CostModel model = SimpleModel();
  const auto plan_of = [&](int columns, int teams) {
    return PlanOf(shape, kHopper, Strategy::kOnChip, false, DType::kBFloat16,
                  columns, teams);
  };
  const auto cost_on = [&](const Device& device, const Plan& plan) {
    return cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays,
                        device, model);
  };
  // Four teams, four rounds.
  const Plan plan = plan_of(64, 4);
  const cuda::Cost even = cost_on(kHopper, plan);
  BNAR_CHECK(even.rounds == 4 && Near(even.waiting, 4 * model.barrier), "");
  BNAR_CHECK(even.launching == model.cooperative_kernel, "cooperative");
  Device graphics = kHopper;
  graphics.single_to_double_ratio = 64;
  BNAR_CHECK(Near(cost_on(graphics, plan).waiting,
                  4 * (model.barrier + 31 * model.double_sums)),
             "32 times as long");

  // A block is late by a share of all that has been done since the last wait:
  // the second pass of a slab and the first one of the next. Only the second
  // pass of the last slab comes after all waits. Nothing is copied in it.
  model.skew = 0.1;
  const double second = array / LoadingRate(model);
  BNAR_CHECK(Near(cost_on(kHopper, plan).waiting,
                  4 * model.barrier + 0.1 * (even.streaming - second / 4)),
             std::to_string(cost_on(kHopper, plan).waiting));
  model.skew = 0;

  // Each column takes its time in each round. Of 66 blocks, 128 threads add a
  // column, so that all of them add 132 at once, and take a second turn for
  // 256. Of 264 blocks, each adds one.
  model.barrier_of_column = 0.25;
  model.barrier_of_turn = 7;
  BNAR_CHECK(
      Near(cost_on(kHopper, plan).waiting, 4 * (model.barrier + 0.25 * 64)),
      "64 columns");
  BNAR_CHECK(Near(cost_on(kHopper, plan_of(256, 4)).waiting,
                  model.barrier + 0.25 * 256 + 7),
             "two turns");
  BNAR_CHECK(Near(cost_on(kHopper, plan_of(256, 1)).waiting,
                  4 * (model.barrier + 0.25 * 256)),
             "one turn");

  // Two kernels have one wait, for a block that adds the sums of all others.
  const Plan two_kernels = PlanOf(shape, kHopper, Strategy::kTwoKernels);
  const cuda::Cost two = cost_on(graphics, two_kernels);
  BNAR_CHECK(Near(two.waiting, model.last_block + 31 * model.double_sums) &&
                 two.launching == 2 * model.kernel,
             "two kernels");
}

// A round in which not every team has a slab, and blocks that wait for no
// other.
void TestRounds() {
  context = "rounds";
  cuda::CostModel model = SimpleModel();
  // Any load keeps memory busy.
  model.memory_latency = 1e-6;
  model.kernel_share = 1;
  const Problem problem{{1, 4096, 36 * 64, 1}, DType::kBFloat16};
  const auto streaming = [&](int teams) {
    const Plan plan = PlanOf(problem.shape, kHopper, Strategy::kOnChip, false,
                             DType::kBFloat16, 64, teams);
    BNAR_CHECK(plan.tiling.num_teams == teams &&
                   plan.tiling.shared_tiles >= plan.tiling.tiles_per_block,
               std::to_string(plan.tiling.num_teams) + " teams");
    return cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays,
                        kHopper, model)
        .streaming;
  };
  // Four of 36 slabs are left for 32 of the 132 multiprocessors.
  BNAR_CHECK(
      Near(streaming(32) / streaming(18), 32.0 / 36 + 4.0 / 36 * 132 / 32),
      std::to_string(streaming(32) / streaming(18)));

  // 40 slabs of 128 KiB, each with a block of its own. L2 keeps what four of
  // them have no room for.
  const Problem alone{{1, 1024, 40 * 64, 1}, DType::kBFloat16};
  Device device = kSmall;
  device.single_to_double_ratio = 64;
  Plan plan = PlanOf(alone.shape, device, Strategy::kOnChip, false,
                     DType::kBFloat16, 64, 4);
  plan.tiling.num_teams = 40;
  plan.grid = 40;
  BNAR_CHECK(plan.tiling.team == 1 &&
                 plan.tiling.shared_tiles < plan.tiling.tiles_per_block,
             std::to_string(plan.tiling.team) + " blocks in a team");
  const cuda::Cost cost =
      cuda::CostOf(plan, alone, cuda::kWidth, cuda::kForwardArrays, device);
  BNAR_CHECK(cost.bytes_again == 0, std::to_string(cost.bytes_again));
  BNAR_CHECK(Near(cost.waiting, 10 * 31 * cuda::CostModel().double_sums),
             std::to_string(cost.waiting));
}

// Clusters are on the device in turns. Of the 264 blocks that fit, 231 count,
// which are 28 clusters of 8.
void TestCostOfClusters() {
  context = "cost of clusters";
  const cuda::CostModel model = SimpleModel();
  for (const int clusters : {1, 28, 29, 56, 57}) {
    // 192 tiles of 32 rows, of which each block of a cluster keeps 24.
    const Shape shape{1, 192 * 32, 64 * clusters, 1};
    const Plan plan =
        PlanOf(shape, kHopper, Strategy::kCluster, false, DType::kBFloat16, 64);
    BNAR_CHECK(plan.cluster == 8 && plan.tiling.num_slabs == clusters &&
                   plan.grid == 8 * clusters && plan.tiling.shared_tiles == 24,
               std::to_string(plan.grid));
    const cuda::Cost cost =
        cuda::CostOf(plan, {shape, DType::kBFloat16}, cuda::kWidth,
                     cuda::kForwardArrays, kHopper, model);
    const int turns = clusters <= 28 ? 1 : clusters <= 56 ? 2 : 3;
    BNAR_CHECK(Near(cost.waiting, turns * model.cluster),
               std::to_string(clusters) + " clusters");
    BNAR_CHECK(cost.launching == model.kernel, "not cooperative");
  }
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
              plan.tiling.shared_tiles < plan.tiling.tiles_per_block;
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
  TestCostOfStream();
  TestNarrowRows();
  TestWaits();
  TestRounds();
  TestCostOfClusters();
  TestPlannedModels();
  TestRoomOfStream();
  return Finish();
}
