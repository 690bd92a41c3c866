#include "cuda/host/plan.h"

#include <algorithm>
#include <vector>

#include "cuda/host/cost.h"

namespace jax_bnar {
namespace cuda {
namespace {

constexpr int64_t kMaxGrid = int64_t{1} << 30;

constexpr const char* kNames[kStrategies] = {"auto", "on_chip", "cluster",
                                             "two_kernels"};

// The bits of a mask, in arrays of x's size.
double MaskShare(DType dtype) {
  return 1.0 / (8 * static_cast<double>(ItemSize(dtype)));
}

// The slots for tiles that a block has room for, in whole stages.
int SlotsPerBlock(const Device& device, int width, int64_t tile_bytes,
                  int blocks_per_multiprocessor) {
  const int64_t per_block = std::min(
      device.shared_bytes_per_block,
      device.shared_bytes_per_multiprocessor / blocks_per_multiprocessor -
          device.reserved_shared_bytes_per_block);
  return static_cast<int>(RoundDown(
      std::max<int64_t>(0, (per_block - kFixedSharedBytes) / tile_bytes),
      TilesOfStage(width, tile_bytes)));
}

// The blocks of a launch that fills the device.
int64_t AllBlocks(const Device& device) {
  return int64_t{device.multiprocessors} * kBlocksPerMultiprocessor;
}

// The blocks that may wait for each other, at the same time as other work.
int64_t WaitingBlocks(const Device& device, const Settings& settings) {
  return std::max<int64_t>(1, device.multiprocessors - settings.sm_margin) *
         kBlocksPerMultiprocessor;
}

Tiling Cut(const Problem& problem, int width, int columns) {
  Tiling tiling =
      CutSlabs(problem.shape, width, columns, problem.mask_channels);
  tiling.word_step = WordStep(problem, width, tiling);
  return tiling;
}

// The ways to cut slabs, the widest ones first. Of a narrower slab a larger
// part stays on chip, at the price of more rounds of barriers, and of rows that
// memory serves more slowly.
std::vector<Tiling> Cuts(const Problem& problem, int width,
                         const Settings& settings) {
  std::vector<Tiling> cuts = {Cut(problem, width,
                                  settings.slab_channels > 0
                                      ? settings.slab_channels
                                      : WidestColumns(problem.dtype))};
  while (settings.slab_channels == 0 &&
         CanCutNarrower(problem, width, cuts.back())) {
    cuts.push_back(Cut(problem, width, cuts.back().columns / 2));
  }
  return cuts;
}

// Keeps what fits of each block's tiles in `slots`, in whole stages. The rest
// is read twice.
void KeepTiles(int slots, int width, int64_t tile_bytes, Plan* plan) {
  Tiling& t = plan->tiling;
  const int64_t wanted =
      RoundUp(t.tiles_per_block, TilesOfStage(width, tile_bytes));
  t.shared_tiles = static_cast<int32_t>(std::min<int64_t>(slots, wanted));
  plan->shared_bytes = SharedBytes(t.shared_tiles, tile_bytes);
}

void SetGrid(int64_t num_teams, Plan* plan) {
  Tiling& t = plan->tiling;
  num_teams = std::min({num_teams, t.num_slabs, kMaxGrid / t.team});
  t.num_teams = static_cast<int32_t>(std::max<int64_t>(1, num_teams));
  plan->grid = static_cast<int64_t>(t.num_teams) * t.team;
}

Plan PlanOneKernel(const Problem& problem, int width, const Device& device,
                   int columns, int64_t largest_team = kMaxGrid) {
  Plan plan{};
  plan.strategy = Strategy::kTwoKernels;
  plan.tiling = Cut(problem, width, columns);
  plan.shared_bytes = kSharedBytesOfPass;
  // Several waves even out the differences between blocks.
  const int64_t blocks = 4 * AllBlocks(device);
  // A block that reads less than this spends most of its time on its start and
  // end.
  const int64_t tiles = TilesOfSlab(plan.tiling);
  SetTeam(std::min({CeilDivide(blocks, plan.tiling.num_slabs),
                    CeilDivide(tiles, 16), largest_team}),
          &plan.tiling);
  SetGrid(plan.tiling.num_slabs, &plan);
  return plan;
}

// The plan with the slabs of so many inputs, instead of those of one. Each slab
// has its own partial sums and totals in the workspace, which is that of as
// many times the groups. The grid stays what it was, unless the workspace has
// no room for the sums of all inputs from so many blocks.
Plan WithSlabsOf(int inputs, Plan plan) {
  if (inputs == 1) return plan;
  Tiling& tiling = plan.tiling;
  tiling.num_slabs *= inputs;
  if (tiling.team > LargestTeam(tiling)) {
    SetTeam(tiling.team, &tiling);
    plan.grid = static_cast<int64_t>(tiling.num_teams) * tiling.team;
    if (tiling.team == 1) plan.block_reduction = BlockReduction::kSingleBlock;
  }
  plan.shared_bytes += (inputs - 1) * kSharedBytesPerInput;
  return plan;
}

// Two blocks of a multiprocessor (`blocks_per_multiprocessor`) read and write
// at the same time; a single one has all the shared memory.
Plan PlanCluster(const Tiling& tiling, int width, const Device& device,
                 int64_t tile_bytes, int blocks_per_multiprocessor) {
  Plan plan{};
  plan.strategy = Strategy::kCluster;
  plan.tiling = tiling;
  const int shared_tiles =
      SlotsPerBlock(device, width, tile_bytes, blocks_per_multiprocessor);
  const int64_t blocks =
      int64_t{device.multiprocessors} * blocks_per_multiprocessor;
  const int64_t tiles = TilesOfSlab(tiling);
  // The smallest cluster that holds a slab, or a larger one if multiprocessors
  // would be idle otherwise.
  int64_t team = 1;
  while (team < kMaxCluster && (team * shared_tiles < tiles ||
                                2 * team * tiling.num_slabs <= blocks)) {
    team *= 2;
  }
  // The number of blocks in a cluster is a power of two, so the last ones may
  // have no tiles.
  SetWholeTeam(PowerOfTwoAtLeast(std::min(team, tiles), kMaxCluster),
               &plan.tiling);
  plan.block_reduction = plan.tiling.team == 1 ? BlockReduction::kSingleBlock
                                               : BlockReduction::kCluster;
  plan.cluster = plan.tiling.team == 1 ? 0 : plan.tiling.team;
  SetGrid(plan.tiling.num_slabs, &plan);
  KeepTiles(shared_tiles, width, tile_bytes, &plan);
  return plan;
}

// There are `teams` teams, if there are as many slabs and blocks.
Plan PlanOnChip(const Tiling& tiling, int width, const Device& device,
                const Settings& settings, int64_t tile_bytes, int slots,
                int64_t teams) {
  Plan plan{};
  plan.strategy = Strategy::kOnChip;
  plan.tiling = tiling;
  const int64_t blocks = WaitingBlocks(device, settings);
  // Every block belongs to a team.
  teams = std::clamp<int64_t>(teams, 1, std::min(blocks, tiling.num_slabs));
  SetTeam(std::max<int64_t>(1, blocks / teams), &plan.tiling);
  plan.block_reduction = plan.tiling.team == 1 ? BlockReduction::kSingleBlock
                                               : BlockReduction::kBarrier;
  // A block that is a team of its own waits for no other, so the grid may
  // exceed the device.
  const int64_t all =
      plan.tiling.team == 1 ? plan.tiling.num_slabs : blocks / plan.tiling.team;
  SetGrid(settings.teams > 0 ? std::min(teams, all) : all, &plan);
  KeepTiles(slots, width, tile_bytes, &plan);
  return plan;
}

// How many teams may share the device: as many as hold their slabs on chip in
// `slots` of each block, a divisor of the number of slabs, so that no team is
// idle in the last round, or a power of 2. If all slabs have a team, its blocks
// wait once, and all channels of a row are read and written at the same time.
std::vector<int64_t> NumbersOfTeams(const Tiling& tiling, int slots,
                                    const Device& device,
                                    const Settings& settings) {
  if (settings.teams > 0) return {settings.teams};
  const int64_t blocks = WaitingBlocks(device, settings);
  const int64_t most = std::min(blocks, tiling.num_slabs);
  const int64_t needed = CeilDivide(TilesOfSlab(tiling), std::max(1, slots));
  std::vector<int64_t> numbers = {
      std::clamp<int64_t>(blocks / needed, 1, most)};
  for (int64_t teams = 1; teams < 2 * most; teams *= 2) {
    numbers.push_back(std::min(teams, most));
  }
  for (int64_t teams = 3; teams < most; ++teams) {
    if (tiling.num_slabs % teams == 0) numbers.push_back(teams);
  }
  return numbers;
}

// Whether the tiles of the plan can be copied. If not all of them are kept, one
// stage is used while the next is copied. This is also enough for the three
// tiles of up to 32 bytes a thread that forward looks at before it begins.
bool Streams(const Plan& plan, int width, int64_t tile_bytes) {
  return width == 1 ||
         plan.tiling.shared_tiles >= plan.tiling.tiles_per_block ||
         plan.tiling.shared_tiles >= 2 * TilesOfStage(width, tile_bytes);
}

// The plans that the device can run, of one strategy or of all of them.
std::vector<Plan> Candidates(Strategy strategy, const Problem& problem,
                             int width, const Traffic& traffic,
                             const Device& device, const Settings& settings) {
  const int64_t tile_bytes = TileBytes(problem, width, traffic.arrays_kept);
  const bool any = strategy == Strategy::kAuto;
  std::vector<Plan> plans;
  for (const Tiling& tiling : Cuts(problem, width, settings)) {
    if (device.clusters && (any || strategy == Strategy::kCluster)) {
      for (const int blocks : {kBlocksPerMultiprocessor, 1}) {
        const Plan plan =
            PlanCluster(tiling, width, device, tile_bytes, blocks);
        // If a slab exceeds its shared memory, a cluster is only a small team.
        const bool fits =
            plan.tiling.tiles_per_block <= plan.tiling.shared_tiles;
        if (fits || (!any && Streams(plan, width, tile_bytes))) {
          plans.push_back(plan);
        }
      }
    }
    if (device.cooperative && (any || strategy == Strategy::kOnChip)) {
      const int slots =
          SlotsPerBlock(device, width, tile_bytes, kBlocksPerMultiprocessor);
      for (const int64_t teams :
           NumbersOfTeams(tiling, slots, device, settings)) {
        const Plan plan = PlanOnChip(tiling, width, device, settings,
                                     tile_bytes, slots, teams);
        if (Streams(plan, width, tile_bytes)) plans.push_back(plan);
      }
    }
  }
  return plans;
}

// The plan that loses least. A plan loses what it takes longer than the best
// one does, which depends on the model that is right; the most that it may lose
// counts. Of equals, it is the plan with the widest slabs. What L2 answers
// takes no time in the models, but some in truth, so a plan that reads tiles
// again must be better than one that does not by more than a trifle.
Plan Best(const std::vector<Plan>& plans, const Problem& problem, int width,
          const Traffic& traffic, const Device& device,
          const std::vector<CostModel>& models) {
  constexpr double kTieTolerance = 0.02;
  if (plans.size() == 1) return plans.front();
  std::vector<double> most_lost(plans.size(), 0);
  std::vector<double> costs(plans.size());
  for (const CostModel& model : models) {
    for (size_t i = 0; i < plans.size(); ++i) {
      const Plan& plan = plans[i];
      const bool again = plan.tiling.shared_tiles < plan.tiling.tiles_per_block;
      costs[i] = CostOf(plan, problem, width, traffic, device, model).total() *
                 (again ? 1 + kTieTolerance : 1);
    }
    const double least = *std::min_element(costs.begin(), costs.end());
    for (size_t i = 0; i < plans.size(); ++i) {
      most_lost[i] = std::max(most_lost[i], costs[i] - least);
    }
  }
  const auto best = std::min_element(most_lost.begin(), most_lost.end());
  return plans[static_cast<size_t>(best - most_lost.begin())];
}

}  // namespace

const char* NameOf(Strategy strategy) {
  return kNames[static_cast<int>(strategy)];
}

bool FindStrategy(std::string_view name, Strategy* strategy) {
  for (int i = 0; i < kStrategies; ++i) {
    if (kNames[i] == name) {
      *strategy = static_cast<Strategy>(i);
      return true;
    }
  }
  return false;
}

Traffic ForwardTraffic(DType dtype, bool has_z, bool has_mask, int inputs) {
  Traffic traffic = kForwardArrays + (inputs - 1);
  if (has_z) traffic.second += 1;
  if (has_mask) traffic.mask_written = MaskShare(dtype);
  traffic.second += traffic.mask_written;
  return traffic;
}

Traffic BackwardTraffic(DType dtype, Gate gate, bool has_dz, int inputs) {
  Traffic traffic = kBackwardArrays + (inputs - 1);
  traffic.second = inputs;
  const double saved = gate == Gate::kY || gate == Gate::kZ ? 1
                       : gate == Gate::kMask                ? MaskShare(dtype)
                                                            : 0;
  traffic.first = saved + (has_dz ? 1 : 0);
  if (gate == Gate::kMask) traffic.mask_read = saved;
  // dz is what the gate leaves of dy, so where it exists the second pass reads
  // it, and needs no gate.
  if (!has_dz) traffic.again += saved;
  return traffic;
}

Plan MakePlan(const Problem& problem, int width, const Traffic& traffic,
              const Device& device, const Settings& settings) {
  return MakePlan(problem, width, traffic, device, settings, PlannedModels());
}

Plan MakePlan(const Problem& problem, int width, const Traffic& traffic,
              const Device& device, const Settings& settings,
              const std::vector<CostModel>& models) {
  const Plan two_kernels =
      PlanOneKernel(problem, width, device, WidestColumns(problem.dtype));
  // The other strategies have no path for float64.
  if (settings.strategy == Strategy::kTwoKernels ||
      problem.dtype == DType::kFloat64) {
    return two_kernels;
  }
  std::vector<Plan> plans =
      Candidates(settings.strategy, problem, width, traffic, device, settings);
  if (plans.empty()) {  // the device cannot do what is asked for
    plans =
        Candidates(Strategy::kAuto, problem, width, traffic, device, settings);
    plans.push_back(two_kernels);
  } else if (settings.strategy == Strategy::kAuto) {
    plans.push_back(two_kernels);
  }
  return Best(plans, problem, width, traffic, device, models);
}

Plan PlanReduction(const Problem& problem, int width, const Device& device,
                   bool whole, int inputs) {
  // The last block of a team alone adds the sums of all others: for 256 columns
  // and 264 blocks, the threads of one block load 33 times eight sums each, one
  // after the other. Narrow slabs have smaller teams, and more threads for a
  // column. For the same reason a team is at most one wave.
  const DType dtype = problem.dtype;
  Plan plan = PlanOneKernel(problem, width, device,
                            whole ? WidestColumns(dtype) : ColumnsOfLine(dtype),
                            AllBlocks(device));
  plan.block_reduction = plan.tiling.team == 1 ? BlockReduction::kSingleBlock
                                               : BlockReduction::kLastBlock;
  return WithSlabsOf(inputs, plan);
}

Plan PlanElementwise(const Problem& problem, int width, const Device& device,
                     int inputs) {
  return WithSlabsOf(inputs, PlanOneKernel(problem, width, device,
                                           WidestColumns(problem.dtype)));
}

Plan PlanStatistics(const Problem& problem, int width, const Device& device,
                    int inputs) {
  // They are cut like one input with as many times the groups.
  Problem all = problem;
  all.shape.groups *= inputs;
  Plan plan = PlanReduction(all, width, device, /*whole=*/false);
  plan.tiling.shape = problem.shape;
  return plan;
}

Plan PlanFlat(const FlatTiling& tiling) {
  Plan plan{};
  plan.strategy = Strategy::kTwoKernels;
  plan.grid = tiling.shape.groups * tiling.blocks_per_group;
  // Three constants for each plane that a block may meet.
  const int64_t planes = tiling.elements_per_block / tiling.shape.inner + 2;
  plan.shared_bytes = 3 * planes * static_cast<int64_t>(sizeof(float));
  return plan;
}

}  // namespace cuda
}  // namespace jax_bnar
