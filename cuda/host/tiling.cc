#include "cuda/host/tiling.h"

#include <algorithm>
#include <numeric>

namespace jax_bnar {
namespace cuda {
namespace {

// The size of the pieces in which memory is fetched.
constexpr int kFetchedBytes = 64;
// The longest rows of slabs.
constexpr int kWidestBytes = 512;
// The channels whose bits lie together in a mask: 16 bytes of each row.
constexpr int kMaskChannels = 128;

Divisor DivisorOf(int64_t value) {
  return {value, 1.0 / static_cast<double>(value)};
}

int64_t TileRows(const Tiling& t) { return kThreads / t.row_vectors; }

// Divided by 2 to this power, any number of channels is 0.
constexpr int kLogOfMost = 62;

int32_t LogOfPowerOfTwo(int64_t power) {
  int32_t log = 0;
  while ((int64_t{1} << log) < power) ++log;
  return log;
}

}  // namespace

int WidestColumns(DType dtype) {
  return static_cast<int>(
      std::min<int64_t>(kMaxColumns, kWidestBytes / ItemSize(dtype)));
}

int ColumnsOfLine(DType dtype) {
  return static_cast<int>(kLineBytes / ItemSize(dtype));
}

int32_t PowerOfTwoAtLeast(int64_t n, int32_t at_most) {
  int32_t power = 1;
  while (power < n && power < at_most) power *= 2;
  return power;
}

Layout LayoutOf(const Shape& shape) {
  return shape.inner > 1 ? Layout::kChannelsFirst : Layout::kChannelsLast;
}

int WidthOf(const Problem& problem, bool aligned) {
  const Shape& shape = problem.shape;
  const int64_t run = shape.inner > 1 ? shape.inner : shape.channels;
  const bool wide =
      aligned && run % kWidth == 0 && problem.dtype != DType::kFloat64;
  return wide ? kWidth : 1;
}

int64_t MaskChannels(const Shape& shape) {
  if (shape.inner > 1 || shape.channels % kWidth != 0) return 0;
  return std::gcd(shape.channels, int64_t{kMaskChannels});
}

Tiling CutSlabs(const Shape& shape, int width, int columns,
                int64_t mask_channels) {
  Tiling t{};
  t.shape = shape;
  t.layout = LayoutOf(shape);
  if (t.layout == Layout::kChannelsFirst) {
    t.row_vectors = 32;
    t.columns = 1;
    t.vectors_per_plane = DivisorOf(shape.inner / width);
    t.plane_stride = shape.channels * shape.inner;
    t.vectors = shape.rows * t.vectors_per_plane.value;
    t.rows = CeilDivide(t.vectors, t.row_vectors);
    t.slabs_per_group = DivisorOf(shape.channels);
  } else {
    // Of single elements a row has as many as a warp reads at once.
    const int32_t widest = std::min(std::max(columns / width, 1), 32);
    t.vectors = shape.channels / width;
    t.row_vectors = PowerOfTwoAtLeast(t.vectors, widest);
    t.columns = t.row_vectors * width;
    t.rows = shape.rows;
    t.slabs_per_group = DivisorOf(CeilDivide(t.vectors, t.row_vectors));
    t.mask_channels = mask_channels > 0 ? mask_channels : shape.channels;
    t.log_mask_channels =
        mask_channels > 0 ? LogOfPowerOfTwo(mask_channels) : kLogOfMost;
  }
  t.num_slabs = shape.groups * t.slabs_per_group.value;
  t.word_step = 1;
  return t;
}

int WordStep(const Problem& problem, int width, const Tiling& t) {
  if (problem.dtype != DType::kFloat32 || width != kWidth) return 1;
  if (t.layout != Layout::kChannelsLast) return 1;
  // The last slab of a row may be narrower than the others.
  return static_cast<int>(std::gcd(t.vectors, int64_t{t.row_vectors}));
}

bool CanCutNarrower(const Problem& problem, int width, const Tiling& t) {
  const int64_t narrowest =
      std::max<int64_t>(width, kFetchedBytes / ItemSize(problem.dtype));
  return t.layout == Layout::kChannelsLast && t.columns / 2 >= narrowest;
}

int64_t TileBytes(const Problem& problem, int width, int arrays) {
  return kThreads * width * ItemSize(problem.dtype) * arrays;
}

int64_t TilesOfSlab(const Tiling& t) { return CeilDivide(t.rows, TileRows(t)); }

int64_t LargestTeam(const Tiling& t) {
  return std::max<int64_t>(1, kPartialColumns / (t.num_slabs * t.columns));
}

void SetTeam(int64_t team, Tiling* t) {
  team = std::min({team, TilesOfSlab(*t), LargestTeam(*t)});
  SetWholeTeam(std::max<int64_t>(1, team), t);
}

void SetWholeTeam(int64_t team, Tiling* t) {
  const int64_t tiles = TilesOfSlab(*t);
  const int64_t per_block = CeilDivide(tiles, team);
  t->team = static_cast<int32_t>(team);
  t->tiles_per_block = static_cast<int32_t>(per_block);
  t->longer_blocks = static_cast<int32_t>(tiles - (per_block - 1) * team);
  if (t->layout == Layout::kChannelsFirst) {
    const int64_t vectors = team * kThreads;
    const int64_t per_plane = t->vectors_per_plane.value;
    t->tile_stride = vectors / per_plane * t->plane_stride;
    t->tile_vectors = vectors % per_plane;
  } else {
    const int64_t rows = team * TileRows(*t);
    t->tile_stride = rows * t->shape.channels;
    const int64_t width = t->columns / t->row_vectors;
    t->mask_tile_stride = rows * t->mask_channels / width;
  }
}

bool IsFlat(const Problem& problem, bool aligned) {
  const Shape& shape = problem.shape;
  // A vector touches at most two planes, whose elements are counted in 32 bits,
  // and every group begins with a whole vector.
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

}  // namespace cuda
}  // namespace jax_bnar
