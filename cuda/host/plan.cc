#include "cuda/host/plan.h"

#include <algorithm>

namespace jax_bnar {
namespace cuda {
namespace {

constexpr int64_t kMaxGrid = int64_t{1} << 30;
// What memory could have moved, for each multiprocessor, while a team that has
// the device to itself meets at its barrier: 3 us of an H200.
constexpr int64_t kBarrierBytes = 100 * 1024;

// Shared tiles hold every kept array.
int64_t TileBytes(const Problem& problem, int width, int arrays_kept) {
  return kThreads * width * ItemSize(problem.dtype) * arrays_kept;
}

int SharedTilesPerBlock(const Device& device, int64_t tile_bytes,
                        int blocks_per_multiprocessor) {
  const int64_t per_block = std::min(
      device.shared_bytes_per_block,
      device.shared_bytes_per_multiprocessor / blocks_per_multiprocessor -
          device.reserved_shared_bytes_per_block);
  return static_cast<int>(
      std::max<int64_t>(0, (per_block - kFixedSharedBytes) / tile_bytes));
}

// Tiles that the largest cluster keeps, a block to a multiprocessor.
int64_t LargestCluster(const Device& device, int64_t tile_bytes) {
  return kMaxCluster * (SharedTilesPerBlock(device, tile_bytes, 1));
}

// Half of L2, because y, z, dz and dx pass through it as well.
int64_t L2ForSlabs(const Device& device) { return device.l2_bytes / 2; }

int64_t ResidentBlocks(const Device& device, const Settings& settings,
                       int per_multiprocessor) {
  return static_cast<int64_t>(
             std::max(1, device.multiprocessors - settings.sm_margin)) *
         per_multiprocessor;
}

Tiling CutWidest(const Problem& problem, int width, const Settings& settings) {
  return CutSlabs(
      problem.shape, width,
      settings.slab_channels > 0 ? settings.slab_channels : kMaxColumns);
}

bool MayCutNarrower(const Problem& problem, int width, const Settings& settings,
                    const Tiling& t) {
  return settings.slab_channels == 0 && CanCutNarrower(problem, width, t);
}

// Keeps what fits of each block's tiles; the rest is read twice.
void KeepTiles(int shared_tiles, int64_t tile_bytes, Plan* plan) {
  const int64_t wanted = std::max<int64_t>(0, TilesPerBlock(plan->tiling));
  plan->tiling.shared_tiles =
      static_cast<int32_t>(std::min<int64_t>(shared_tiles, wanted));
  plan->shared_bytes = SharedBytes(plan->tiling.shared_tiles, tile_bytes);
}

void SetGrid(int64_t num_teams, Plan* plan) {
  Tiling& t = plan->tiling;
  num_teams = std::min({num_teams, t.num_slabs, kMaxGrid / t.team});
  t.num_teams = static_cast<int32_t>(std::max<int64_t>(1, num_teams));
  plan->grid = static_cast<int64_t>(t.num_teams) * t.team;
}

Plan PlanOneKernel(const Problem& problem, int width, const Device& device,
                   const Settings& settings, int64_t largest_team = kMaxGrid) {
  Plan plan{};
  plan.strategy = Strategy::kTwoKernels;
  plan.tiling = CutSlabs(problem.shape, width);
  plan.shared_bytes = SharedBytes(0, 0);
  // Several waves, so that blocks of unequal luck even out.
  const int64_t blocks =
      4 * ResidentBlocks(device, settings, kBlocksPerMultiprocessor);
  // A block that reads less than four batches is mostly start and end.
  const int64_t tiles = TilesOfSlab(plan.tiling);
  SetTeam(std::min({CeilDivide(blocks, plan.tiling.num_slabs),
                    CeilDivide(tiles, 16), largest_team}),
          &plan.tiling);
  SetGrid(plan.tiling.num_slabs, &plan);
  return plan;
}

Plan PlanCluster(const Problem& problem, int width, int arrays_kept,
                 const Device& device, const Settings& settings) {
  Plan plan{};
  plan.strategy = Strategy::kCluster;
  const int64_t tile_bytes = TileBytes(problem, width, arrays_kept);
  const int64_t blocks =
      ResidentBlocks(device, settings, kBlocksPerMultiprocessor);
  plan.tiling = CutWidest(problem, width, settings);
  // Narrower where a slab would not fit, or multiprocessors would stand idle.
  while (MayCutNarrower(problem, width, settings, plan.tiling) &&
         (TilesOfSlab(plan.tiling) > LargestCluster(device, tile_bytes) ||
          2 * kMaxCluster * plan.tiling.num_slabs <= blocks)) {
    plan.tiling = CutSlabs(problem.shape, width, plan.tiling.columns / 2);
  }
  const int64_t tiles = TilesOfSlab(plan.tiling);
  // Two blocks to a multiprocessor read and write at the same time, but a slab
  // that fits only if each has all the shared memory is better read once.
  int shared_tiles =
      SharedTilesPerBlock(device, tile_bytes, kBlocksPerMultiprocessor);
  if (kMaxCluster * (shared_tiles) < tiles) {
    shared_tiles = SharedTilesPerBlock(device, tile_bytes, 1);
  }
  const int64_t capacity = shared_tiles;
  // The smallest cluster that holds a slab, or a larger one as long as blocks
  // would stand idle.
  int64_t team = 1;
  while (team < kMaxCluster && (team * capacity < tiles ||
                                2 * team * plan.tiling.num_slabs <= blocks)) {
    team *= 2;
  }
  SetTeam(team, &plan.tiling);
  // A cluster has a power of two of blocks; the last ones may have no rows.
  plan.tiling.team = PowerOfTwoAtLeast(plan.tiling.team, kMaxCluster);
  plan.block_reduction = plan.tiling.team == 1 ? BlockReduction::kSingleBlock
                                               : BlockReduction::kCluster;
  plan.cluster = plan.tiling.team == 1 ? 0 : plan.tiling.team;
  KeepTiles(shared_tiles, tile_bytes, &plan);
  SetGrid(plan.tiling.num_slabs, &plan);
  return plan;
}

// Bytes that are read from memory again, and those that it could have moved
// while teams wait.
int64_t WasteOnChip(const Plan& plan, const Device& device,
                    int64_t tile_bytes) {
  const Tiling& t = plan.tiling;
  const int64_t left = std::max<int64_t>(0, TilesPerBlock(t) - t.shared_tiles);
  const int64_t again =
      std::max<int64_t>(0, left * t.team * tile_bytes - L2ForSlabs(device));
  const int64_t barriers =
      t.team == 1 ? 0 : CeilDivide(t.num_slabs, t.num_teams);
  return t.num_slabs * again +
         barriers * kBarrierBytes * device.multiprocessors;
}

Plan PlanOnChipOf(const Tiling& tiling, const Device& device,
                  const Settings& settings, int64_t tile_bytes) {
  Plan plan{};
  plan.strategy = Strategy::kOnChip;
  plan.tiling = tiling;
  const int shared_tiles =
      SharedTilesPerBlock(device, tile_bytes, kBlocksPerMultiprocessor);
  const int64_t capacity = std::max(1, shared_tiles);
  const int64_t blocks =
      ResidentBlocks(device, settings, kBlocksPerMultiprocessor);
  const int64_t needed = CeilDivide(TilesOfSlab(tiling), capacity);
  const int64_t fair = blocks / tiling.num_slabs;
  SetTeam(std::min(std::max(needed, fair), blocks), &plan.tiling);
  plan.block_reduction = plan.tiling.team == 1 ? BlockReduction::kSingleBlock
                                               : BlockReduction::kBarrier;
  KeepTiles(shared_tiles, tile_bytes, &plan);
  // Alone there is nobody to wait for, so the grid may exceed the device.
  SetGrid(
      plan.tiling.team == 1 ? plan.tiling.num_slabs : blocks / plan.tiling.team,
      &plan);
  return plan;
}

// Of slabs of half the channels twice as large a part stays on chip, for twice
// as many barriers.
Plan PlanOnChip(const Problem& problem, int width, int arrays_kept,
                const Device& device, const Settings& settings) {
  const int64_t tile_bytes = TileBytes(problem, width, arrays_kept);
  Tiling tiling = CutWidest(problem, width, settings);
  Plan best = PlanOnChipOf(tiling, device, settings, tile_bytes);
  while (MayCutNarrower(problem, width, settings, tiling)) {
    tiling = CutSlabs(problem.shape, width, tiling.columns / 2);
    const Plan plan = PlanOnChipOf(tiling, device, settings, tile_bytes);
    if (WasteOnChip(plan, device, tile_bytes) <
        WasteOnChip(best, device, tile_bytes)) {
      best = plan;
    }
  }
  return best;
}

Plan PlanL2(const Problem& problem, int width, int arrays_kept,
            const Device& device, const Settings& settings) {
  Plan plan{};
  plan.strategy = Strategy::kL2;
  plan.shared_bytes = SharedBytes(0, 0);
  const int64_t blocks =
      ResidentBlocks(device, settings, kBlocksPerMultiprocessor);
  const int64_t tile_bytes = TileBytes(problem, width, arrays_kept);
  plan.tiling = CutWidest(problem, width, settings);
  while (MayCutNarrower(problem, width, settings, plan.tiling) &&
         TilesOfSlab(plan.tiling) * tile_bytes > L2ForSlabs(device)) {
    plan.tiling = CutSlabs(problem.shape, width, plan.tiling.columns / 2);
  }
  const int64_t slab_bytes = TilesOfSlab(plan.tiling) * tile_bytes;
  const int64_t at_once = std::max<int64_t>(
      1, std::min(L2ForSlabs(device) / slab_bytes, plan.tiling.num_slabs));
  SetTeam(std::max<int64_t>(1, blocks / at_once), &plan.tiling);
  plan.block_reduction = plan.tiling.team == 1 ? BlockReduction::kSingleBlock
                                               : BlockReduction::kBarrier;
  SetGrid(std::max<int64_t>(1, blocks / plan.tiling.team), &plan);
  return plan;
}

// The plan of a shape for which no strategy is asked.
Plan PlanBest(const Problem& problem, int width, int arrays_kept,
              const Device& device, const Settings& settings) {
  const int64_t tile_bytes = TileBytes(problem, width, arrays_kept);
  const int64_t tiles = TilesOfSlab(CutWidest(problem, width, settings));
  if (device.clusters && tiles <= LargestCluster(device, tile_bytes)) {
    return PlanCluster(problem, width, arrays_kept, device, settings);
  }
  if (!device.cooperative) {
    return PlanOneKernel(problem, width, device, settings);
  }
  const Plan on_chip =
      PlanOnChip(problem, width, arrays_kept, device, settings);
  const bool fits =
      TilesPerBlock(on_chip.tiling) <= on_chip.tiling.shared_tiles;
  if (!fits && tiles * tile_bytes <= L2ForSlabs(device)) {
    return PlanL2(problem, width, arrays_kept, device, settings);
  }
  // On chip for a part at least.
  return on_chip;
}

}  // namespace

Plan MakePlan(const Problem& problem, int width, int arrays_kept,
              const Device& device, const Settings& settings) {
  // float64 has the simple path alone.
  if (settings.strategy == Strategy::kTwoKernels ||
      problem.dtype == DType::kFloat64) {
    return PlanOneKernel(problem, width, device, settings);
  }
  if (settings.strategy == Strategy::kCluster && device.clusters) {
    return PlanCluster(problem, width, arrays_kept, device, settings);
  }
  if (settings.strategy == Strategy::kOnChip && device.cooperative) {
    return PlanOnChip(problem, width, arrays_kept, device, settings);
  }
  if (settings.strategy == Strategy::kL2 && device.cooperative) {
    return PlanL2(problem, width, arrays_kept, device, settings);
  }
  return PlanBest(problem, width, arrays_kept, device, settings);
}

Plan PlanReduction(const Problem& problem, int width, const Device& device,
                   const Settings& settings) {
  // One wave: the last block of a team adds the sums of all others alone.
  Plan plan =
      PlanOneKernel(problem, width, device, settings,
                    ResidentBlocks(device, settings, kBlocksPerMultiprocessor));
  plan.block_reduction = plan.tiling.team == 1 ? BlockReduction::kSingleBlock
                                               : BlockReduction::kLastBlock;
  return plan;
}

Plan PlanElementwise(const Problem& problem, int width, const Device& device,
                     const Settings& settings) {
  return PlanOneKernel(problem, width, device, settings);
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
