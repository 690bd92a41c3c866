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

// Checks that every tile of a slab belongs to one block: block `rank` has the
// tiles `rank`, `rank + team` and so on.
void CheckTiles(const cuda::Tiling& t, bool cluster) {
  const int64_t tiles = CeilDivide(t.rows, cuda::kThreads / t.row_vectors);
  for (int64_t rank = 0; rank < t.team; ++rank) {
    const int64_t count = t.tiles_per_block - (rank < t.longer_blocks ? 0 : 1);
    BNAR_CHECK(count == CeilDivide(std::max<int64_t>(0, tiles - rank), t.team),
               "block " + std::to_string(rank) + " has " +
                   std::to_string(count) + " tiles");
    BNAR_CHECK(count > 0 || cluster, "a block has no tiles");
  }
}

// Checks that every element belongs to one tile of one block.
void CheckCoverage(const Problem& problem, int width, const Plan& plan) {
  const cuda::Tiling& t = plan.tiling;
  const Shape& shape = problem.shape;
  CheckTiles(t, plan.block_reduction == BlockReduction::kCluster);
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
}

void CheckResources(const Problem& problem, const Plan& plan, int stage,
                    const Device& device, const Settings& settings) {
  const cuda::Tiling& t = plan.tiling;
  BNAR_CHECK(t.shared_tiles % stage == 0 &&
                 t.shared_tiles <= cuda::RoundUp(t.tiles_per_block, stage),
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
  if (plan.block_reduction != BlockReduction::kCluster) {
    const int64_t needed = cuda::LayWorkspace(plan.tiling).bytes;
    BNAR_CHECK(needed <= cuda::WorkspaceBytes(problem.shape),
               "workspace of " + std::to_string(needed));
  }
  const int64_t bound = cuda::BoundOfWorkspace().Of(problem.shape);
  BNAR_CHECK(cuda::WorkspaceBytes(problem.shape) <= bound,
             "bound on the workspace, " + std::to_string(bound));
}

// With many groups, as under vmap, a block has slabs of its own, which nobody
// else adds to: 16 bytes a channel and group.
void TestWorkspaceOfManyGroups() {
  for (const Shape& shape :
       {Shape{1024, 32, 2048, 1}, Shape{256, 49, 2048, 1}}) {
    context = "workspace of " + std::to_string(shape.groups) + " groups";
    const int64_t bytes = cuda::WorkspaceBytes(shape);
    BNAR_CHECK(bytes <= 16 * shape.groups * shape.channels + 256,
               std::to_string(bytes) + " bytes");
  }
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
            for (const int slab_channels : {0, 8, 32, 256}) {
              const int sm_margin = slab_channels == 32 ? 3 : 0;
              const int teams = slab_channels == 8 ? 5 : 0;
              const Problem problem{shape, dtype};
              const Settings settings{strategy, sm_margin, slab_channels,
                                      teams};
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
              const Plan elementwise =
                  cuda::PlanElementwise(problem, width, named.device);
              CheckCoverage(problem, width, elementwise);
              CheckResources(problem, elementwise, 1, named.device, settings);
              for (const bool whole : {false, true}) {
                const Plan reduction =
                    cuda::PlanReduction(problem, width, named.device, whole);
                CheckCoverage(problem, width, reduction);
                CheckResources(problem, reduction, 1, named.device, settings);
                const cuda::Tiling& t = reduction.tiling;
                BNAR_CHECK(t.team <= named.device.multiprocessors *
                                         cuda::kBlocksPerMultiprocessor,
                           "the last block adds the sums of more than a wave");
                BNAR_CHECK(whole ? t.columns == elementwise.tiling.columns
                                 : t.columns * ItemSize(dtype) <= 128,
                           "slabs of " + std::to_string(t.columns));
              }
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
            for (const int teams : {0, 3}) {
              for (const int64_t rows : {3000, 256 * 56 * 56}) {
                const Problem problem{{1, rows, 256, 1}, DType::kBFloat16};
                const Settings settings{strategy, 0, slab_channels, teams};
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
                                              t.num_teams,
                                              t.shared_tiles};
                };
                const auto made =
                    by([](const auto&... of) { return cuda::MakePlan(of...); });
                const auto known = by(
                    [](const auto&... of) { return cuda::KnownPlan(of...); });
                BNAR_CHECK(made == known, named.name);
              }
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

  // What fits is read once, so no block has a tile to read again: 13 MB, and
  // twice as much.
  const Shape small = {1, 256 * 7 * 7, 512, 1};
  for (const bool backward : {false, true}) {
    const Plan plan = PlanOf(small, kHopper, Strategy::kAuto, backward);
    BNAR_CHECK(plan.tiling.tiles_per_block <= plan.tiling.shared_tiles,
               std::to_string(plan.tiling.tiles_per_block) + " tiles, " +
                   std::to_string(plan.tiling.shared_tiles) + " kept");
  }
}

// The slots for tiles that a block has.
void TestSlots() {
  context = "slots";
  const Shape wide{1, 256 * 56 * 56, 256, 1};  // hundreds of tiles each
  struct Expected {
    DType dtype;
    bool backward;
    int shared;
    int64_t tile_bytes;
  };
  // Two blocks with their 17 KiB, and the 1 KiB that the system takes of each,
  // leave 2 * 96 KiB of 228 KiB. These are 24 slots of 4 KiB, for 8 elements of
  // 16 bits of each of 256 threads.
  for (const Expected& expected : {Expected{DType::kBFloat16, false, 24, 4096},
                                   Expected{DType::kFloat16, false, 24, 4096},
                                   Expected{DType::kBFloat16, true, 12, 8192},
                                   Expected{DType::kFloat32, false, 12, 8192},
                                   Expected{DType::kFloat32, true, 6, 16384}}) {
    const Plan plan = PlanOf(wide, kHopper, Strategy::kOnChip,
                             expected.backward, expected.dtype);
    BNAR_CHECK(plan.tiling.shared_tiles == expected.shared,
               std::to_string(plan.tiling.shared_tiles));
    BNAR_CHECK(plan.shared_bytes == 17 * kKiB + 96 * kKiB &&
                   plan.shared_bytes ==
                       cuda::SharedBytes(expected.shared, expected.tile_bytes),
               std::to_string(plan.shared_bytes));
  }
  // What does not make a stage of four tiles is rounded down, where there is no
  // room for more, and up, where a block has fewer tiles than slots.
  for (const int room : {8, 11, 12}) {
    Device device = kHopper;
    device.shared_bytes_per_block = cuda::kFixedSharedBytes + room * 4096;
    BNAR_CHECK(PlanOf(wide, device, Strategy::kOnChip).tiling.shared_tiles ==
                   (room == 12 ? 12 : 8),
               std::to_string(room) + " slots");
  }
  // 264 blocks have 9 tiles of 32 rows each.
  const Plan plan = PlanOf({1, 264 * 9 * 32, 64, 1}, kHopper, Strategy::kOnChip,
                           false, DType::kBFloat16, 64);
  BNAR_CHECK(plan.tiling.tiles_per_block == 9 && plan.tiling.shared_tiles == 12,
             std::to_string(plan.tiling.shared_tiles));
  // Single elements are not copied, and need no stages: 264 blocks have 9 tiles
  // of 8 rows of 32 channels each.
  const Plan single = cuda::MakePlan({{1, 264 * 9 * 8, 32, 1}, DType::kFloat32},
                                     1, 1, kHopper, {Strategy::kOnChip});
  BNAR_CHECK(single.tiling.shared_tiles == 9,
             std::to_string(single.tiling.shared_tiles));
}

// Slabs have half the channels if this saves more than the additional rounds
// cost, and as long as memory serves their rows as fast.
void TestSlabChannels() {
  context = "channels of a slab";
  const Shape wide = {1, 256 * 56 * 56, 256, 1};
  const Shape last = {1, 256 * 7 * 7, 512, 1};
  const auto columns = [](const Plan& plan) { return plan.tiling.columns; };
  const auto plan_if = [&](double barrier, double line_share,
                           double narrow_share) {
    cuda::CostModel model;
    model.barrier = barrier;
    model.line_share = line_share;
    model.narrow_share = narrow_share;
    return cuda::MakePlan({wide, DType::kBFloat16}, cuda::kWidth,
                          cuda::kForwardArrays, kHopper, {Strategy::kOnChip},
                          {model});
  };
  BNAR_CHECK(columns(plan_if(0, 1, 1)) == 32,
             "103 MB for each slab of 64 channels, and 51 for each of 32");
  BNAR_CHECK(columns(plan_if(0, 1, 0.5)) == 64, "rows of 64 bytes are slow");
  BNAR_CHECK(columns(plan_if(0, 0.5, 0.5)) == 128,
             "rows of 128 bytes are slow too");
  const cuda::Tiling once = plan_if(1000, 1, 1).tiling;
  BNAR_CHECK(once.num_teams == once.num_slabs, "one round");
  BNAR_CHECK(columns(PlanOf(wide, kHopper, Strategy::kTwoKernels)) == 256 &&
                 columns(PlanOf(wide, kHopper, Strategy::kTwoKernels, false,
                                DType::kFloat32)) == 128,
             "512 bytes");
  for (const bool backward : {false, true}) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      const int bytes =
          static_cast<int>(ItemSize(dtype)) *
          columns(PlanOf(wide, kHopper, Strategy::kAuto, backward, dtype));
      BNAR_CHECK(bytes == 256, std::to_string(bytes) + " bytes in a row");
    }
  }
  const Plan cluster = PlanOf(last, kHopper, Strategy::kCluster);
  BNAR_CHECK(columns(cluster) == 32 && cluster.grid == 128,
             "8 clusters would leave half of the device idle");
  for (const Strategy strategy : kStrategies) {
    for (const int asked : {16, 64, 256}) {
      const Plan plan =
          PlanOf(wide, kHopper, strategy, false, DType::kBFloat16, asked);
      // Two kernels always have the widest ones, and need less time than rows
      // of 32 bytes.
      const bool two_kernels = strategy == Strategy::kTwoKernels ||
                               (strategy == Strategy::kAuto && asked == 16);
      BNAR_CHECK((plan.strategy == Strategy::kTwoKernels) == two_kernels, "");
      BNAR_CHECK(columns(plan) == (two_kernels ? 256 : asked), "as asked for");
    }
  }
  BNAR_CHECK(columns(PlanOf({1, 99, 3, 1}, kHopper, Strategy::kOnChip, false,
                            DType::kBFloat16, 16)) == 4,
             "no more than there are");
}

// All blocks are shared among the teams.
void TestTeams() {
  context = "teams";
  const Shape eight_slabs = {1, 256 * 28 * 28, 512, 1};
  for (const int teams : {1, 2, 4, 8, 100}) {
    const Plan plan = PlanOf(eight_slabs, kHopper, Strategy::kOnChip, false,
                             DType::kBFloat16, 64, teams);
    const int expected = std::min(teams, 8);
    BNAR_CHECK(plan.tiling.num_teams == expected &&
                   plan.tiling.team == 264 / expected && plan.grid == 264,
               std::to_string(plan.tiling.num_teams) + " teams, not " +
                   std::to_string(expected));
  }
  const Plan uneven = PlanOf(eight_slabs, kHopper, Strategy::kOnChip, false,
                             DType::kBFloat16, 64, 5);
  BNAR_CHECK(uneven.tiling.num_teams == 5 && uneven.tiling.team == 52 &&
                 uneven.grid == 260,
             "four blocks are left over");

  // Nine slabs, each of which fits exactly the 24 slots of a third of the
  // blocks: 2112 tiles of 32 rows.
  const Problem problem{{1, 2112 * 32, 9 * 64, 1}, DType::kBFloat16};
  // L2 keeps nothing, and copies need not be many.
  const auto plan_if = [&](double barrier) {
    cuda::CostModel model;
    model.barrier = barrier;
    model.share_of_l2 = 0;
    model.kernel_share = 1;
    return cuda::MakePlan(problem, cuda::kWidth, cuda::kForwardArrays, kHopper,
                          {Strategy::kOnChip, 0, 64}, {model})
        .tiling;
  };
  const cuda::Tiling kept = plan_if(0);
  BNAR_CHECK(kept.num_teams == 3 && kept.team == 88 &&
                 kept.tiles_per_block == 24 && kept.shared_tiles == 24,
             std::to_string(kept.num_teams) + " teams");
  // Where L2 keeps the rest, all teams are busy in each round, and the number
  // is neither a power of 2 nor what holds the slabs.
  const Problem eighteen{{1, 256 * 49, 18 * 64, 1}, DType::kFloat32};
  const cuda::Tiling full =
      cuda::MakePlan(eighteen, cuda::kWidth, cuda::kBackwardArrays, kHopper,
                     {Strategy::kOnChip, 0, 64})
          .tiling;
  BNAR_CHECK(full.num_slabs == 18 && full.num_teams == 6 && full.team == 44,
             std::to_string(full.num_teams) + " teams");
  const cuda::Tiling waits_once = plan_if(100);
  BNAR_CHECK(waits_once.num_teams == 9 && waits_once.team == 29,
             std::to_string(waits_once.num_teams) + " teams");
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  TestWorkspaceOfManyGroups();
  TestEveryPlan();
  TestKnownPlans();
  TestChoice();
  TestSlots();
  TestSlabChannels();
  TestTeams();
  return Finish();
}
