// Tests the planner for devices of different sizes, without a GPU.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/host/cost.h"
#include "cuda/host/plan.h"
#include "cuda/host/settings.h"
#include "cuda/host/workspace.h"
#include "tests/native/check.h"

namespace jax_bnar {
namespace testing {
namespace {

using cuda::BlockReduction;
using cuda::Device;
using cuda::Layout;
using cuda::Plan;
using cuda::Settings;
using cuda::Strategy;

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;

// The devices as they describe themselves.
constexpr Device kHopper = {132,       228 * kKiB, 227 * kKiB, kKiB,
                            50 * kMiB, true,       true};
constexpr Device kAmpere = {108,       164 * kKiB, 163 * kKiB, kKiB,
                            40 * kMiB, true,       false};
constexpr Device kSmall = {2,        64 * kKiB, 48 * kKiB, kKiB,
                           2 * kMiB, true,      false};
constexpr Device kLone = {132,       228 * kKiB, 227 * kKiB, kKiB,
                          50 * kMiB, false,      false};

struct Named {
  const char* name;
  Device device;
};
constexpr Named kDevices[] = {{"Hopper", kHopper},
                              {"Ampere", kAmpere},
                              {"small", kSmall},
                              {"without cooperation", kLone}};
constexpr Strategy kStrategies[] = {Strategy::kAuto, Strategy::kOnChip,
                                    Strategy::kCluster, Strategy::kTwoKernels};

int ArraysKept(bool backward) {
  return backward ? cuda::kBackwardArrays : cuda::kForwardArrays;
}

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

void CheckResources(const Problem& problem, const Plan& plan,
                    const Device& device, const Settings& settings) {
  const cuda::Tiling& t = plan.tiling;
  BNAR_CHECK(t.prefetch_tiles >= 0 && t.prefetch_tiles <= t.shared_tiles &&
                 (t.prefetch_tiles == 0 || t.num_slabs > t.num_teams),
             std::to_string(t.prefetch_tiles) + " tiles ahead");
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
                CheckResources(problem, plan, named.device, settings);
              }
              const Plan reduction =
                  cuda::PlanReduction(problem, width, named.device, settings);
              for (const Plan& plan :
                   {reduction, cuda::PlanElementwise(problem, width,
                                                     named.device, settings)}) {
                CheckCoverage(problem, width, plan);
                CheckResources(problem, plan, named.device, settings);
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

Plan PlanOf(const Shape& shape, const Device& device,
            Strategy strategy = Strategy::kAuto, bool backward = false,
            DType dtype = DType::kBFloat16, int slab_channels = 0) {
  const Problem problem{shape, dtype};
  const int width = cuda::WidthOf(problem, true);
  return cuda::MakePlan(problem, width, ArraysKept(backward), device,
                        {strategy, 0, slab_channels});
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
      const cuda::Tiling& t = plan.tiling;
      const int64_t tiles = t.rows_per_block / (cuda::kThreads / t.row_vectors);
      BNAR_CHECK(tiles <= t.shared_tiles, std::to_string(tiles) + " tiles, " +
                                              std::to_string(t.shared_tiles) +
                                              " kept");
    }
  }
}

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

// Checks that the bits of a block's rows of some channels, whose bits lie
// together, are a run of whole sectors. The sectors at the ends of the channels
// may be shared with others.
void CheckRun(const cuda::Tiling& t, int64_t begin, int64_t end,
              int64_t channel) {
  constexpr int64_t kBitsOfSector = 256;
  const int64_t first = cuda::MaskBit(t, begin, channel);
  const int64_t last = cuda::MaskBit(t, end - 1, channel + t.mask_channels - 1);
  BNAR_CHECK(last - first + 1 == (end - begin) * t.mask_channels,
             "the bits are not neighbours");
  BNAR_CHECK(begin == 0 || first % kBitsOfSector == 0,
             "a sector of two blocks at row " + std::to_string(begin));
  BNAR_CHECK(end == t.rows || (last + 1) % kBitsOfSector == 0,
             "a sector of two blocks at row " + std::to_string(end));
}

// At every site of ResNet-50, a block writes and reads whole sectors of the
// mask, whatever the planner chooses.
void TestMaskSectors() {
  struct Site {
    int64_t size, channels;
  };
  constexpr Site kSites[] = {{112, 64},  {56, 64},  {56, 256}, {56, 128},
                             {28, 128},  {28, 512}, {28, 256}, {14, 256},
                             {14, 1024}, {14, 512}, {7, 512},  {7, 2048}};
  const auto check = [](const Problem& problem, const Plan& plan) {
    const cuda::Tiling& t = plan.tiling;
    const int64_t channels = problem.shape.channels;
    BNAR_CHECK(t.mask_channels == problem.mask_channels &&
                   t.columns % t.mask_channels == 0,
               "two slabs share the channels whose bits lie together");
    for (int64_t channel = 0; channel < channels; channel += t.mask_channels) {
      for (int64_t rank = 0; rank < t.team; ++rank) {
        const int64_t begin = rank * t.rows_per_block;
        const int64_t end = std::min(t.rows, begin + t.rows_per_block);
        if (begin < end) CheckRun(t, begin, end, channel);
      }
    }
  };
  for (const Named& named : kDevices) {
    for (const Site& site : kSites) {
      for (const int64_t batch : {32, 256}) {
        for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
          const Shape shape = {1, batch * site.size * site.size, site.channels,
                               1};
          const Problem problem{shape, dtype,
                                cuda::MaskChannels(shape, ItemSize(dtype))};
          context = std::string("masks of ") + named.name + " " +
                    std::to_string(site.size) + " " +
                    std::to_string(site.channels) + " batch " +
                    std::to_string(batch);
          for (const Strategy strategy : kStrategies) {
            for (const cuda::Traffic& traffic :
                 {cuda::ForwardTraffic(dtype, true, true),
                  cuda::BackwardTraffic(dtype, Gate::kMask, true)}) {
              const Plan plan = cuda::MakePlan(problem, cuda::kWidth, traffic,
                                               named.device, {strategy, 0, 0});
              check(problem, plan);
              BNAR_CHECK(cuda::CostOf(plan, problem, cuda::kWidth, traffic,
                                      named.device)
                                 .bytes_of_sectors == 0,
                         "the model knows it");
            }
          }
          check(problem,
                cuda::PlanElementwise(problem, cuda::kWidth, named.device, {}));
          check(problem,
                cuda::PlanReduction(problem, cuda::kWidth, named.device, {}));
        }
      }
    }
  }
  context = "channels of masks";
  const auto channels = [](const Shape& shape, DType dtype) {
    return cuda::MaskChannels(shape, ItemSize(dtype));
  };
  BNAR_CHECK(channels({1, 9, 80, 1}, DType::kBFloat16) == 16, "16 divides 80");
  BNAR_CHECK(channels({1, 9, 80, 1}, DType::kFloat64) == 8, "a whole byte");
  BNAR_CHECK(channels({1, 9, 65, 1}, DType::kBFloat16) == 0, "65 is odd");
  BNAR_CHECK(channels({1, 9, 64, 2}, DType::kBFloat16) == 0, "planes");
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

// Tiles in registers come before those in shared memory.
void TestRegisterTiles() {
  context = "tiles in registers";
  const Problem problem{{1, 256 * 28 * 28, 512, 1}, DType::kBFloat16};
  const auto plan_of = [&](int tiles) {
    cuda::Traffic traffic = cuda::kBackwardArrays;
    traffic.register_tiles = tiles;
    return cuda::MakePlan(problem, cuda::kWidth, traffic, kHopper,
                          {Strategy::kOnChip, 0, 64, /*tiles_ahead=*/0});
  };
  const Plan without = plan_of(0), with = plan_of(6);
  BNAR_CHECK(without.register_tiles == 0 && with.register_tiles == 6, "kept");
  BNAR_CHECK(cuda::TilesKept(with) - cuda::TilesKept(without) == 6 ||
                 cuda::TilesKept(with) == cuda::TilesPerBlock(with.tiling),
             "six more of them, or all");
  BNAR_CHECK(cuda::TilesPerBlock(with.tiling) > with.tiling.shared_tiles,
             "the slab does not fit shared memory alone");
}

// Slabs have half the channels if this saves more rereading than the additional
// rounds cost, down to pieces of 64 bytes.
void TestSlabChannels() {
  context = "channels of a slab";
  const Shape wide = {1, 256 * 56 * 56, 256, 1};
  const Shape middle = {1, 256 * 28 * 28, 512, 1};
  const Shape last = {1, 256 * 7 * 7, 512, 1};
  const auto columns = [](const Plan& plan) { return plan.tiling.columns; };
  BNAR_CHECK(columns(PlanOf(wide, kHopper)) == 32, "103 MB, and 51 are kept");
  BNAR_CHECK(columns(PlanOf(wide, kHopper, Strategy::kAuto, false,
                            DType::kFloat32)) == 16,
             "64 bytes are 16 channels of float32");
  BNAR_CHECK(columns(PlanOf(middle, kHopper)) == 32 &&
                 PlanOf(middle, kHopper).tiling.num_teams == 2,
             "26 MB fit the chip, but of two teams one reads while one waits");
  BNAR_CHECK(columns(PlanOf(middle, kHopper, Strategy::kAuto, true)) == 32,
             "a wait costs less than reading again");
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
  BNAR_CHECK(none.tiling.prefetch_tiles == 0 && some.tiling.prefetch_tiles == 4,
             "as asked for");
  const auto bytes = [](const Plan& plan) {
    return cuda::SharedBytes(
        plan.tiling.shared_tiles + plan.tiling.prefetch_tiles, 4096);
  };
  BNAR_CHECK(
      none.shared_bytes == bytes(none) && some.shared_bytes == bytes(some),
      "room for them");
  BNAR_CHECK(plan_of(1000).tiling.prefetch_tiles <= 12, "half of the room");
  BNAR_CHECK(plan_of(4, 1).tiling.prefetch_tiles == 0,
             "there are no copies of two bytes");

  // They cover the wait of a single team.
  const auto waiting = [&](const Plan& plan) {
    return cuda::CostOf(plan, problem, cuda::kWidth, cuda::kForwardArrays,
                        kHopper)
        .waiting;
  };
  Plan alone = none, ahead = none;
  for (Plan* plan : {&alone, &ahead}) {
    cuda::SetTeam(264, &plan->tiling);
    plan->tiling.num_teams = 1;
    plan->tiling.shared_tiles = 12;
  }
  ahead.tiling.prefetch_tiles = 4;
  const double rate = cuda::StreamingRate(kHopper, cuda::CostModel());
  const double covered = 4 * 4096.0 * ahead.tiling.team / rate;
  BNAR_CHECK(std::abs(waiting(alone) - 16 * 4) < 1e-9 &&
                 std::abs(waiting(ahead) - 16 * (4 - covered)) < 1e-9,
             std::to_string(waiting(ahead)));
  ahead.tiling.prefetch_tiles = 1000;
  BNAR_CHECK(std::abs(waiting(ahead) - 16 * 4 * 0.1) < 1e-9, "all but a tenth");
}

void TestWidth() {
  context = "width";
  const auto width = [](Shape shape, DType dtype, bool aligned) {
    return cuda::WidthOf({shape, dtype}, aligned);
  };
  BNAR_CHECK(width({1, 3, 64, 1}, DType::kFloat16, true) == 8, "");
  BNAR_CHECK(width({1, 3, 64, 1}, DType::kFloat16, false) == 1, "");
  BNAR_CHECK(width({1, 3, 65, 1}, DType::kFloat32, true) == 1, "");
  BNAR_CHECK(width({1, 3, 5, 16}, DType::kBFloat16, true) == 8, "");
  BNAR_CHECK(width({1, 3, 8, 49}, DType::kBFloat16, true) == 1, "");
  BNAR_CHECK(width({1, 3, 64, 1}, DType::kFloat64, true) == 1, "");
}

void TestFlat() {
  context = "flat";
  const auto is_flat = [](const Shape& shape, DType dtype, bool aligned) {
    return cuda::IsFlat({shape, dtype}, aligned);
  };
  BNAR_CHECK(is_flat({1, 10, 2048, 49}, DType::kFloat32, true), "7x7");
  BNAR_CHECK(!is_flat({1, 10, 2048, 49}, DType::kFloat32, false), "alignment");
  BNAR_CHECK(!is_flat({1, 10, 2048, 49}, DType::kFloat64, true), "float64");
  BNAR_CHECK(!is_flat({1, 10, 256, 3136}, DType::kFloat32, true), "56x56");
  BNAR_CHECK(!is_flat({1, 10, 256, 7}, DType::kFloat32, true), "three planes");
  BNAR_CHECK(!is_flat({1, 490, 2048, 1}, DType::kFloat32, true), "rows");
  BNAR_CHECK(is_flat({2, 4, 6, 9}, DType::kFloat32, true), "whole vectors");
  BNAR_CHECK(!is_flat({2, 2, 3, 49}, DType::kFloat32, true), "group of 294");
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const Shape& shape :
         {Shape{1, 10, 2048, 49}, Shape{3, 8, 5, 9}, Shape{1, 1, 1, 99999},
          Shape{1, int64_t{1} << 26, 2, 49}}) {
      const cuda::FlatTiling t = cuda::CutFlat({shape, dtype});
      const Plan plan = cuda::PlanFlat(t);
      BNAR_CHECK(t.elements_per_block % (cuda::kThreads * cuda::kWidth) == 0,
                 "a vector of two blocks");
      BNAR_CHECK(
          t.blocks_per_group * t.elements_per_block >= shape.group_size() &&
              (t.blocks_per_group - 1) * t.elements_per_block <
                  shape.group_size(),
          "elements");
      BNAR_CHECK(plan.grid == shape.groups * t.blocks_per_group &&
                     plan.grid <= INT32_MAX,
                 "grid");
      // The most planes, of a block that begins with the last element of one.
      const int64_t planes = (t.elements_per_block - 2) / shape.inner + 2;
      BNAR_CHECK(
          plan.shared_bytes >= planes * 12 && plan.shared_bytes <= 48 * kKiB,
          "constants");
    }
  }
}

void TestSettings() {
  context = "settings";
  const auto read = [](const char* strategy, const char* sm_margin,
                       Settings* settings, const char* slab_channels = "") {
    setenv("JAX_BNAR_CUDA_STRATEGY", strategy, 1);
    setenv("JAX_BNAR_CUDA_SM_MARGIN", sm_margin, 1);
    setenv("JAX_BNAR_CUDA_SLAB_CHANNELS", slab_channels, 1);
    return cuda::ReadSettings(settings);
  };
  Settings settings;
  BNAR_CHECK(read("", "", &settings).empty() &&
                 settings.strategy == Strategy::kAuto &&
                 settings.sm_margin == 0 && settings.slab_channels == 0,
             "defaults");
  BNAR_CHECK(read("cluster", "12", &settings, "32").empty() &&
                 settings.strategy == Strategy::kCluster &&
                 settings.sm_margin == 12 && settings.slab_channels == 32,
             "values");
  BNAR_CHECK(read("fast", "", &settings).find("'fast'") != std::string::npos,
             "unknown strategy");
  for (const char* sm_margin : {"-1", "two", "1.5", "99999999999999999999"}) {
    BNAR_CHECK(
        read("", sm_margin, &settings).find(sm_margin) != std::string::npos,
        sm_margin);
  }
  // A former name of SM_MARGIN. It is written in two pieces, because it must
  // not be in the table of variables.
  constexpr char kUnknown[] =
      "JAX_BNAR_CUDA_"
      "MARGIN";
  setenv(kUnknown, "2", 1);
  BNAR_CHECK(
      read("", "", &settings).find(std::string(kUnknown) + " is not known") ==
          0,
      "a name that nobody reads");
  unsetenv(kUnknown);
  setenv("JAX_BNAR_CUDA_ZERO_WORKSPACE", "1", 1);
  BNAR_CHECK(read("", "", &settings).empty() && settings.zero_workspace,
             "the workspace is zeroed");
  setenv("JAX_BNAR_CUDA_ZERO_WORKSPACE", "yes", 1);
  BNAR_CHECK(read("", "", &settings).find("ZERO_WORKSPACE must be 0 or 1") !=
                 std::string::npos,
             "a value that is not known");
  unsetenv("JAX_BNAR_CUDA_ZERO_WORKSPACE");
  BNAR_CHECK(read("", "", &settings).empty() && !settings.zero_workspace,
             "the workspace is left as it is");
  setenv("JAX_BNAR_CUDA_TILES_AHEAD", "3", 1);
  BNAR_CHECK(read("", "", &settings).empty() && settings.tiles_ahead == 3, "");
  for (const char* tiles : {"-1", "some", "0.5"}) {
    setenv("JAX_BNAR_CUDA_TILES_AHEAD", tiles, 1);
    BNAR_CHECK(
        read("", "", &settings).find("TILES_AHEAD must be a number of tiles") !=
            std::string::npos,
        tiles);
  }
  unsetenv("JAX_BNAR_CUDA_TILES_AHEAD");
  BNAR_CHECK(read("", "", &settings).empty() && settings.tiles_ahead < 0,
             "the planner's choice");
  for (const char* channels : {"0", "-8", "4", "24", "128", "many", "8.0"}) {
    const std::string wrong = read("", "", &settings, channels);
    BNAR_CHECK(wrong.find("SLAB_CHANNELS must be 8, 16, 32 or 64, got '" +
                          std::string(channels)) != std::string::npos,
               channels);
  }
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  TestEveryPlan();
  TestChoice();
  TestCost();
  TestTraffic();
  TestMaskSectors();
  TestBandwidth();
  TestRegisterTiles();
  TestSlabChannels();
  TestTilesAhead();
  TestWidth();
  TestFlat();
  TestSettings();
  return Finish();
}
