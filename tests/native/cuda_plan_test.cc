// Tests which plans the planner makes for devices of different sizes.

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/host/cost.h"
#include "cuda/host/known_plans.h"
#include "cuda/host/parameters.h"
#include "cuda/host/plan.h"
#include "cuda/host/tiling.h"
#include "cuda/host/workspace.h"
#include "tests/native/check.h"
#include "tests/native/cuda_devices.h"

namespace jax_bnar {
namespace testing {
namespace {

using cuda::BlockReduction;
using cuda::CeilDivide;
using cuda::Device;
using cuda::Layout;
using cuda::Plan;
using cuda::Settings;
using cuda::Strategy;

// Checks that every element belongs to one tile of one block.
void CheckCoverage(const Problem& problem, int width, const Plan& plan) {
  const cuda::Tiling& t = plan.tiling;
  const Shape& shape = problem.shape;
  BNAR_CHECK(t.rows_per_block * t.team >= t.rows, "rows are left out");
  BNAR_CHECK(t.rows_per_block * (t.team - 1) < t.rows ||
                 plan.block_reduction == BlockReduction::kCluster,
             "a block has no rows");
  BNAR_CHECK(t.rows_per_block % (cuda::kThreads / t.row_vectors) == 0,
             "tiles of two blocks overlap");
  BNAR_CHECK(t.num_slabs == shape.groups * t.slabs_per_group.value, "slabs");
  if (t.layout == Layout::kChannelsFirst) {
    BNAR_CHECK(t.vectors * width == shape.rows * shape.inner, "vectors");
    BNAR_CHECK(t.rows * t.row_vectors >= t.vectors, "vectors are left out");
    BNAR_CHECK(t.slabs_per_group.value == shape.channels, "channels");
  } else {
    BNAR_CHECK(t.vectors * width == shape.channels, "vectors");
    BNAR_CHECK(t.slabs_per_group.value * t.row_vectors >= t.vectors,
               "channels left out");
    BNAR_CHECK(t.rows == shape.rows, "rows");
  }
  BNAR_CHECK(t.columns <= cuda::kMaxColumns, "columns exceed shared memory");
  BNAR_CHECK(plan.grid == static_cast<int64_t>(t.team) * t.num_teams &&
                 plan.grid >= 1 && t.num_teams <= t.num_slabs,
             "grid " + std::to_string(plan.grid));
  // Tiles are counted in int.
  BNAR_CHECK(
      CeilDivide(t.rows_per_block * t.row_vectors, cuda::kThreads) <= INT32_MAX,
      "tiles of a block");
}

void CheckResources(const Problem& problem, const Plan& plan, int stage,
                    const Device& device, const Settings& settings) {
  const cuda::Tiling& t = plan.tiling;
  for (const int tiles : {t.shared_tiles, t.tiles_ahead}) {
    BNAR_CHECK(tiles % stage == 0, std::to_string(tiles) + " tiles in stages");
  }
  BNAR_CHECK(t.tiles_ahead >= 0 && t.tiles_ahead <= t.shared_tiles &&
                 (t.tiles_ahead == 0 || t.num_slabs > t.num_teams),
             std::to_string(t.tiles_ahead) + " tiles ahead");
  BNAR_CHECK(t.shared_tiles <= cuda::RoundUp(cuda::TilesPerBlock(t), stage),
             std::to_string(t.shared_tiles) + " tiles stay");
  BNAR_CHECK(plan.shared_bytes <= device.shared_bytes_per_block,
             "shared memory of a block");
  // A block of a cluster, or alone, may take a whole multiprocessor.
  const int64_t resident =
      plan.strategy == Strategy::kCluster ? 1 : cuda::kBlocksPerMultiprocessor;
  BNAR_CHECK(
      resident * (plan.shared_bytes + device.reserved_shared_bytes_per_block) <=
          device.shared_bytes_per_multiprocessor,
      "shared memory of a multiprocessor");
  if (plan.block_reduction == BlockReduction::kBarrier) {
    const int multiprocessors = device.multiprocessors - settings.sm_margin;
    BNAR_CHECK(device.cooperative, "no cooperative launches there");
    BNAR_CHECK(
        plan.grid <= resident * (multiprocessors < 1 ? 1 : multiprocessors),
        "blocks that wait for each other are not all resident");
  }
  if (plan.block_reduction == BlockReduction::kCluster) {
    BNAR_CHECK(device.clusters, "no clusters there");
    BNAR_CHECK(
        plan.cluster == plan.tiling.team &&
            (plan.cluster == 2 || plan.cluster == 4 || plan.cluster == 8),
        "cluster of " + std::to_string(plan.cluster));
  }
  if (plan.block_reduction == BlockReduction::kSingleBlock) {
    BNAR_CHECK(plan.tiling.team == 1 || plan.strategy == Strategy::kTwoKernels,
               "nobody adds");
  }
  const int64_t needed = cuda::LayWorkspace(plan.tiling).bytes;
  BNAR_CHECK(needed <= cuda::WorkspaceBytes(problem.shape),
             "workspace of " + std::to_string(needed));
  const int64_t bound = cuda::BoundOfWorkspace().Of(problem.shape);
  BNAR_CHECK(cuda::WorkspaceBytes(problem.shape) <= bound,
             "bound on the workspace, " + std::to_string(bound));
}

void TestEveryPlan() {
  const std::vector<Shape> shapes = {{1, 1, 1, 1},
                                     {1, 2, 3, 1},
                                     {1, 301, 65, 1},
                                     {3, 37, 251, 1},
                                     {1, 12544, 2048, 1},
                                     {1, 3211264, 64, 1},
                                     {64, 3136, 256, 1},
                                     {1, 5, 1 << 20, 1},
                                     {1, 256, 64, 12544},
                                     {2, 3, 5, 49},
                                     {1, 1, 3, 7},
                                     {1, int64_t{1} << 33, 1, 1},
                                     {1, int64_t{1} << 20, 3, 4096}};
  const DType dtypes[] = {DType::kFloat16, DType::kFloat32, DType::kFloat64};
  for (const Named& named : kDevices) {
    for (const Shape& shape : shapes) {
      for (const DType dtype : dtypes) {
        for (const bool aligned : {true, false}) {
          for (const Strategy strategy : kStrategies) {
            for (const int slab_channels : {0, 8, 32}) {
              const int sm_margin = slab_channels == 32 ? 3 : 0;
              const Problem problem{shape, dtype};
              const Settings settings{strategy, sm_margin, slab_channels};
              const int width = cuda::WidthOf(problem, aligned);
              context = std::string(named.name) + " " +
                        std::to_string(shape.groups) + " " +
                        std::to_string(shape.rows) + " " +
                        std::to_string(shape.channels) + " " +
                        std::to_string(shape.inner) + " width " +
                        std::to_string(width) + " strategy " +
                        std::to_string(static_cast<int>(strategy)) +
                        " slabs of " + std::to_string(slab_channels);
              for (const bool backward : {false, true}) {
                const Plan plan =
                    cuda::MakePlan(problem, width, ArraysKept(backward),
                                   named.device, settings);
                CheckCoverage(problem, width, plan);
                const int stage = cuda::TilesOfStage(
                    width, cuda::kThreads * width * ItemSize(dtype) *
                               ArraysKept(backward));
                CheckResources(problem, plan, stage, named.device, settings);
              }
              const Plan reduction =
                  cuda::PlanReduction(problem, width, named.device, settings);
              for (const Plan& plan :
                   {reduction, cuda::PlanElementwise(problem, width,
                                                     named.device, settings)}) {
                CheckCoverage(problem, width, plan);
                CheckResources(problem, plan, 1, named.device, settings);
              }
              BNAR_CHECK(
                  reduction.tiling.team <=
                      std::max(1, named.device.multiprocessors - sm_margin) *
                          cuda::kBlocksPerMultiprocessor,
                  "the last block adds the sums of more than a wave");
            }
          }
        }
      }
    }
  }
}

// A plan that is remembered is the one of the same question, whatever else has
// been asked in between.
void TestKnownPlans() {
  context = "known plans";
  for (int time = 0; time < 2; ++time) {
    for (const Named& named : kDevices) {
      for (const Strategy strategy : kStrategies) {
        for (const int slab_channels : {0, 16}) {
          for (const bool backward : {false, true}) {
            for (const int64_t rows : {3000, 256 * 56 * 56}) {
              const Problem problem{{1, rows, 256, 1}, DType::kBFloat16};
              const Settings settings{strategy, 0, slab_channels};
              const auto by = [&](auto make) {
                const Plan plan =
                    make(problem, cuda::kWidth, ArraysKept(backward),
                         named.device, settings);
                const cuda::Tiling& t = plan.tiling;
                return std::vector<int64_t>{static_cast<int>(plan.strategy),
                                            plan.grid,
                                            plan.shared_bytes,
                                            t.columns,
                                            t.team,
                                            t.shared_tiles,
                                            t.tiles_ahead};
              };
              const auto made =
                  by([](const auto&... of) { return cuda::MakePlan(of...); });
              const auto known =
                  by([](const auto&... of) { return cuda::KnownPlan(of...); });
              BNAR_CHECK(made == known, named.name);
            }
          }
        }
      }
    }
  }
}

// ResNet-50 at batch 256 in bfloat16, on the device that the design is for.
void TestChoice() {
  context = "choice";
  const Shape stem = {1, 256 * 112 * 112, 64, 1};
  const Shape middle = {1, 256 * 14 * 14, 1024, 1};
  const Shape last = {1, 256 * 7 * 7, 2048, 1};
  const Plan cluster = PlanOf(last, kHopper, Strategy::kCluster);
  BNAR_CHECK(cluster.strategy == Strategy::kCluster &&
                 2 * (cluster.shared_bytes +
                      kHopper.reserved_shared_bytes_per_block) <=
                     kHopper.shared_bytes_per_multiprocessor,
             "clusters, two blocks to a multiprocessor");
  BNAR_CHECK(PlanOf(middle, kHopper).strategy == Strategy::kOnChip,
             "6.4 MB fit the chip");
  BNAR_CHECK(PlanOf(stem, kHopper).strategy == Strategy::kOnChip,
             "411 MB fit nowhere; a part stays on chip");
  BNAR_CHECK(PlanOf(last, kAmpere).strategy == Strategy::kOnChip,
             "no clusters there");
  BNAR_CHECK(PlanOf(last, kLone).strategy == Strategy::kTwoKernels,
             "no barrier there");

  // What fits is read once, so no block has a tile to read again.
  for (const Shape& shape : {middle, last}) {
    for (const bool backward : {false, true}) {
      const Plan plan = PlanOf(shape, kHopper, Strategy::kAuto, backward);
      const int64_t tiles = cuda::TilesPerBlock(plan.tiling);
      BNAR_CHECK(tiles <= plan.tiling.shared_tiles,
                 std::to_string(tiles) + " tiles, " +
                     std::to_string(plan.tiling.shared_tiles) + " kept");
    }
  }
}

// Tiles of the next slab take the slots of tiles that would have stayed there.
void TestSlotsOfTilesAhead() {
  context = "slots of tiles ahead";
  const Shape wide{1, 256 * 56 * 56, 256, 1};  // 48 tiles for each block
  const auto plan_of = [](const Shape& shape, DType dtype, bool backward,
                          int ahead) {
    return cuda::MakePlan({shape, dtype}, cuda::kWidth, ArraysKept(backward),
                          kHopper, {Strategy::kOnChip, 0, 0, ahead})
        .tiling;
  };
  struct Expected {
    DType dtype;
    bool backward;
    int ahead;  // as asked for
    int shared;
  };
  // 24 slots hold x of 16 bits, 12 of them e and x, or x of 32 bits.
  for (const Expected& expected : {Expected{DType::kBFloat16, false, 0, 24},
                                   Expected{DType::kBFloat16, false, 4, 20},
                                   Expected{DType::kFloat16, false, 12, 12},
                                   Expected{DType::kBFloat16, true, 0, 12},
                                   Expected{DType::kBFloat16, true, 6, 6},
                                   Expected{DType::kFloat32, false, 6, 6},
                                   Expected{DType::kFloat32, true, 3, 3}}) {
    const cuda::Tiling t =
        plan_of(wide, expected.dtype, expected.backward, expected.ahead);
    BNAR_CHECK(
        t.shared_tiles == expected.shared && t.tiles_ahead == expected.ahead,
        std::to_string(t.shared_tiles) + " and " +
            std::to_string(t.tiles_ahead));
  }
  // What does not make a stage is rounded down.
  const Shape middle{1, 256 * 14 * 14, 1024, 1};
  for (const int ahead : {8, 11}) {
    const cuda::Tiling t = plan_of(middle, DType::kBFloat16, false, ahead);
    BNAR_CHECK(t.tiles_ahead == 8, "whole stages");
  }
  const Shape planes{1, 256, 64, 56 * 56};
  const cuda::Tiling t = plan_of(planes, DType::kBFloat16, false, 4);
  BNAR_CHECK(t.tiles_ahead == 4, "channels first");
}

// Slabs have half the channels if this saves more rereading than the additional
// rounds cost. This takes rows of 128 bytes, or the certainty that memory
// serves rows of 64 bytes as fast.
void TestSlabChannels() {
  context = "channels of a slab";
  const Shape wide = {1, 256 * 56 * 56, 256, 1};
  const Shape middle = {1, 256 * 28 * 28, 512, 1};
  const Shape last = {1, 256 * 7 * 7, 512, 1};
  const auto columns = [](const Plan& plan) { return plan.tiling.columns; };
  BNAR_CHECK(columns(PlanOf(wide, kHopper)) == 64, "rows of 128 bytes");
  BNAR_CHECK(columns(PlanOf(wide, kHopper, Strategy::kAuto, false,
                            DType::kFloat32)) == 32,
             "128 bytes are 32 channels of float32");
  cuda::CostModel certain;
  certain.narrow_share = 1;
  const auto columns_if_certain = [&](const Shape& shape, bool backward,
                                      DType dtype) {
    return columns(cuda::MakePlan({shape, dtype}, cuda::kWidth,
                                  ArraysKept(backward), kHopper, {},
                                  {certain}));
  };
  BNAR_CHECK(columns_if_certain(wide, false, DType::kBFloat16) == 32,
             "103 MB, and 51 are kept");
  const Plan two_teams = PlanOf(middle, kHopper);
  BNAR_CHECK(columns(two_teams) == 64 && two_teams.tiling.num_teams == 2,
             "of two teams one reads while one waits; L2 has what is left");
  BNAR_CHECK(columns(PlanOf(middle, kHopper, Strategy::kAuto, true)) == 64,
             "L2 would hold half as much of rows of 64 bytes");
  const Plan cluster = PlanOf(last, kHopper, Strategy::kCluster);
  BNAR_CHECK(columns(cluster) == 32 && cluster.grid == 128,
             "8 clusters would leave half of the device idle");
  for (const Strategy strategy : kStrategies) {
    if (strategy == Strategy::kTwoKernels) continue;
    BNAR_CHECK(columns(PlanOf(wide, kHopper, strategy, false, DType::kBFloat16,
                              16)) == 16,
               "as asked for");
  }
  BNAR_CHECK(columns(PlanOf({1, 99, 3, 1}, kHopper, Strategy::kOnChip, false,
                            DType::kBFloat16, 16)) == 4,
             "no more than there are");
}

// While blocks wait for each other, tiles of the next slab are on their way.
void TestTilesAhead() {
  context = "tiles ahead";
  // A team of 264 blocks has 12 tiles each of a slab of 32 channels, and room
  // for 24.
  const Problem problem{{1, 256 * 28 * 28, 512, 1}, DType::kBFloat16};
  Settings settings{Strategy::kOnChip, 0, 32};
  const auto plan_of = [&](int tiles_ahead, int width = cuda::kWidth) {
    settings.tiles_ahead = tiles_ahead;
    return cuda::MakePlan(problem, width, cuda::kForwardArrays, kHopper,
                          settings);
  };
  const Plan none = plan_of(0), some = plan_of(4);
  BNAR_CHECK(none.tiling.tiles_ahead == 0 && some.tiling.tiles_ahead == 4,
             "as asked for");
  const auto bytes = [](const Plan& plan) {
    return cuda::SharedBytes(plan.tiling.shared_tiles + plan.tiling.tiles_ahead,
                             4096);
  };
  BNAR_CHECK(
      none.shared_bytes == bytes(none) && some.shared_bytes == bytes(some),
      "room for them");
  BNAR_CHECK(plan_of(1000).tiling.tiles_ahead <= 12, "half of the room");
  BNAR_CHECK(plan_of(4, 1).tiling.tiles_ahead == 0,
             "there are no copies of two bytes");
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  TestEveryPlan();
  TestKnownPlans();
  TestChoice();
  TestSlotsOfTilesAhead();
  TestSlabChannels();
  TestTilesAhead();
  return Finish();
}
