#include "cuda/plan.h"

#include <algorithm>

#include "cuda/shared_memory.h"

namespace jax_bnar {
namespace gpu {
namespace {

// Columns of partial sums of all slabs and blocks together. Bounds the
// workspace at 4 MiB for any number of channels.
constexpr int64_t kPartialColumns = int64_t{1} << 18;
// A cluster of more blocks is not portable.
constexpr int kMaxCluster = 8;
constexpr int64_t kMaxGrid = int64_t{1} << 30;
constexpr int64_t kAlignment = 256;

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t Align(int64_t bytes) {
  return CeilDivide(bytes, kAlignment) * kAlignment;
}

int32_t PowerOfTwoAtLeast(int64_t n, int32_t at_most) {
  int32_t power = 1;
  while (power < n && power < at_most) power *= 2;
  return power;
}

// The cut of the array into slabs; teams come later.
Tiling CutSlabs(const Shape& shape, int width) {
  Tiling t{};
  t.shape = shape;
  t.planes = shape.inner > 1;
  if (t.planes) {
    t.lanes = 32;
    t.columns = 1;
    t.vectors_per_plane = shape.inner / width;
    t.vectors = shape.rows * t.vectors_per_plane;
    t.rows = CeilDivide(t.vectors, t.lanes);
    t.slabs_per_group = shape.channels;
  } else {
    // 128 bytes of a row (16-bit), a line of the cache; 256 of float32. Single
    // elements: what a warp reads at once.
    const int32_t widest = std::min(kMaxColumns / width, 32);
    t.vectors = shape.channels / width;
    t.lanes = PowerOfTwoAtLeast(t.vectors, widest);
    t.columns = t.lanes * width;
    t.rows = shape.rows;
    t.slabs_per_group = CeilDivide(t.vectors, t.lanes);
    t.tile_stride = kThreads / t.lanes * shape.channels;
  }
  t.num_slabs = shape.groups * t.slabs_per_group;
  return t;
}

int64_t TileRows(const Tiling& t) { return kThreads / t.lanes; }

int64_t TilesOfSlab(const Tiling& t) { return CeilDivide(t.rows, TileRows(t)); }

int64_t LargestTeam(const Tiling& t) {
  return std::max<int64_t>(1, kPartialColumns / (t.num_slabs * t.columns));
}

// Shares the rows of a slab among at most `team` blocks, in whole tiles.
void SetTeam(int64_t team, Tiling* t) {
  const int64_t tiles = TilesOfSlab(*t);
  team = std::max<int64_t>(1, std::min({team, tiles, LargestTeam(*t)}));
  const int64_t tiles_per_block = CeilDivide(tiles, team);
  t->rows_per_block = tiles_per_block * TileRows(*t);
  t->team = static_cast<int32_t>(CeilDivide(tiles, tiles_per_block));
}

int64_t TilesPerBlock(const Tiling& t) {
  return t.rows_per_block / TileRows(t);
}

// Shared tiles hold every kept array.
int64_t TileBytes(const Problem& problem, int width, const Pass& pass) {
  return kThreads * width * ItemSize(problem.dtype) * pass.arrays_kept;
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

int64_t ResidentBlocks(const Device& device, const Settings& settings,
                       int per_multiprocessor) {
  return static_cast<int64_t>(
             std::max(1, device.multiprocessors - settings.margin)) *
         per_multiprocessor;
}

// Keeps what fits of each block's tiles; the rest is read twice.
void KeepTiles(int shared_tiles, int64_t tile_bytes, const Pass& pass,
               Plan* plan) {
  const int64_t wanted =
      std::max<int64_t>(0, TilesPerBlock(plan->tiling) - pass.held);
  plan->held = pass.held;
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

Plan PlanCluster(const Problem& problem, int width, const Pass& pass,
                 const Device& device, const Settings& settings) {
  Plan plan{};
  plan.strategy = Strategy::kCluster;
  plan.tiling = CutSlabs(problem.shape, width);
  const int64_t tile_bytes = TileBytes(problem, width, pass);
  const int64_t tiles = TilesOfSlab(plan.tiling);
  const int64_t blocks =
      ResidentBlocks(device, settings, kBlocksPerMultiprocessor);
  // Two blocks to a multiprocessor read and write at the same time, but a slab
  // that fits only if each has all the shared memory is better read once.
  int shared_tiles =
      SharedTilesPerBlock(device, tile_bytes, kBlocksPerMultiprocessor);
  if (kMaxCluster * (pass.held + shared_tiles) < tiles) {
    shared_tiles = SharedTilesPerBlock(device, tile_bytes, 1);
  }
  const int64_t capacity = pass.held + shared_tiles;
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
  plan.exchange = plan.tiling.team == 1 ? Exchange::kAlone : Exchange::kCluster;
  plan.cluster = plan.tiling.team == 1 ? 0 : plan.tiling.team;
  KeepTiles(shared_tiles, tile_bytes, pass, &plan);
  SetGrid(plan.tiling.num_slabs, &plan);
  return plan;
}

Plan PlanOnChip(const Problem& problem, int width, const Pass& pass,
                const Device& device, const Settings& settings) {
  Plan plan{};
  plan.strategy = Strategy::kOnChip;
  plan.tiling = CutSlabs(problem.shape, width);
  const int64_t tile_bytes = TileBytes(problem, width, pass);
  const int shared_tiles =
      SharedTilesPerBlock(device, tile_bytes, kBlocksPerMultiprocessor);
  const int64_t capacity = pass.held + std::max(1, shared_tiles);
  const int64_t blocks =
      ResidentBlocks(device, settings, kBlocksPerMultiprocessor);
  const int64_t needed = CeilDivide(TilesOfSlab(plan.tiling), capacity);
  const int64_t fair = blocks / plan.tiling.num_slabs;
  SetTeam(std::min(std::max(needed, fair), blocks), &plan.tiling);
  plan.exchange = plan.tiling.team == 1 ? Exchange::kAlone : Exchange::kBarrier;
  KeepTiles(shared_tiles, tile_bytes, pass, &plan);
  // Alone there is nobody to wait for, so the grid may exceed the device.
  SetGrid(
      plan.tiling.team == 1 ? plan.tiling.num_slabs : blocks / plan.tiling.team,
      &plan);
  return plan;
}

Plan PlanL2(const Problem& problem, int width, const Pass& pass,
            const Device& device, const Settings& settings) {
  Plan plan{};
  plan.strategy = Strategy::kL2;
  plan.tiling = CutSlabs(problem.shape, width);
  plan.shared_bytes = SharedBytes(0, 0);
  const int64_t blocks =
      ResidentBlocks(device, settings, kBlocksPerMultiprocessor);
  const int64_t slab_bytes =
      TilesOfSlab(plan.tiling) * TileBytes(problem, width, pass);
  // Half of L2, because y, z, dz and dx pass through it as well.
  const int64_t at_once = std::max<int64_t>(
      1, std::min(device.l2_bytes / 2 / slab_bytes, plan.tiling.num_slabs));
  SetTeam(std::max<int64_t>(1, blocks / at_once), &plan.tiling);
  plan.exchange = plan.tiling.team == 1 ? Exchange::kAlone : Exchange::kBarrier;
  SetGrid(std::max<int64_t>(1, blocks / plan.tiling.team), &plan);
  return plan;
}

Strategy Choose(const Problem& problem, int width, const Pass& pass,
                const Device& device, const Settings& settings) {
  const Tiling tiling = CutSlabs(problem.shape, width);
  const int64_t tile_bytes = TileBytes(problem, width, pass);
  const int64_t tiles = TilesOfSlab(tiling);
  const auto capacity = [&](int blocks_per_multiprocessor) {
    return pass.held +
           SharedTilesPerBlock(device, tile_bytes, blocks_per_multiprocessor);
  };
  if (device.clusters && tiles <= kMaxCluster * capacity(1)) {
    return Strategy::kCluster;
  }
  if (!device.cooperative) return Strategy::kTwoKernels;
  const int64_t blocks =
      ResidentBlocks(device, settings, kBlocksPerMultiprocessor);
  if (tiles <= blocks * capacity(kBlocksPerMultiprocessor))
    return Strategy::kOnChip;
  if (tiles * tile_bytes <= device.l2_bytes / 2) return Strategy::kL2;
  // On chip for a part at least.
  return Strategy::kOnChip;
}

}  // namespace

int WidthOf(const Problem& problem, bool aligned) {
  const Shape& shape = problem.shape;
  const int64_t run = shape.inner > 1 ? shape.inner : shape.channels;
  const bool wide =
      aligned && run % kWidth == 0 && problem.dtype != DType::kFloat64;
  return wide ? kWidth : 1;
}

Plan MakePlan(const Problem& problem, int width, const Pass& pass,
              const Device& device, const Settings& settings) {
  // float64 has the simple path alone.
  if (problem.dtype == DType::kFloat64) {
    return PlanOneKernel(problem, width, device, settings);
  }
  Strategy strategy = settings.strategy;
  const bool possible =
      strategy == Strategy::kCluster ? device.clusters
      : strategy == Strategy::kOnChip || strategy == Strategy::kL2
          ? device.cooperative
          : strategy == Strategy::kTwoKernels;
  if (!possible) strategy = Choose(problem, width, pass, device, settings);
  switch (strategy) {
    case Strategy::kCluster:
      return PlanCluster(problem, width, pass, device, settings);
    case Strategy::kOnChip:
      return PlanOnChip(problem, width, pass, device, settings);
    case Strategy::kL2:
      return PlanL2(problem, width, pass, device, settings);
    default:
      return PlanOneKernel(problem, width, device, settings);
  }
}

Plan PlanReduction(const Problem& problem, int width, const Device& device,
                   const Settings& settings) {
  // One wave: the last block of a team adds the sums of all others alone.
  Plan plan =
      PlanOneKernel(problem, width, device, settings,
                    ResidentBlocks(device, settings, kBlocksPerMultiprocessor));
  plan.exchange = plan.tiling.team == 1 ? Exchange::kAlone : Exchange::kLast;
  return plan;
}

Plan PlanElementwise(const Problem& problem, int width, const Device& device,
                     const Settings& settings) {
  return PlanOneKernel(problem, width, device, settings);
}

bool IsFlat(const Problem& problem, bool aligned) {
  const Shape& shape = problem.shape;
  // A vector meets two planes at most, counted in 32 bits; those of a group
  // begin where a vector does.
  return aligned && problem.dtype != DType::kFloat64 && shape.inner > kWidth &&
         shape.inner % kWidth != 0 && shape.inner < (int64_t{1} << 30) &&
         (shape.groups == 1 || shape.group_size() % kWidth == 0);
}

FlatTiling CutFlat(const Problem& problem) {
  FlatTiling t{};
  t.shape = problem.shape;
  t.elements_per_block = kFlatBytes / ItemSize(problem.dtype);
  t.blocks_per_group =
      CeilDivide(problem.shape.group_size(), t.elements_per_block);
  return t;
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

WorkspaceLayout LayWorkspace(const Tiling& t) {
  WorkspaceLayout layout{};
  layout.counter_bytes = t.num_slabs * static_cast<int64_t>(sizeof(uint32_t));
  layout.totals = Align(layout.counter_bytes);
  const int64_t columns = t.num_slabs * t.columns;
  layout.partials =
      Align(layout.totals + columns * static_cast<int64_t>(sizeof(Sums)));
  layout.bytes =
      layout.partials + columns * t.team * static_cast<int64_t>(sizeof(Sums));
  return layout;
}

int64_t WorkspaceBytes(const Shape& shape) {
  int64_t bytes = 0;
  // Misaligned buffers, which are not known yet, are read element by element.
  for (const bool aligned : {false, true}) {
    Tiling t = CutSlabs(shape, WidthOf({shape, DType::kFloat16}, aligned));
    // A cluster may count more blocks than it has tiles.
    t.team = static_cast<int32_t>(std::max<int64_t>(
        kMaxCluster, std::min(TilesOfSlab(t), LargestTeam(t))));
    bytes = std::max(bytes, LayWorkspace(t).bytes);
  }
  return bytes;
}

}  // namespace gpu
}  // namespace jax_bnar
