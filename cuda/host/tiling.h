// Cuts the array into what blocks work on: plain host code, no CUDA.

#ifndef JAX_BNAR_CUDA_HOST_TILING_H_
#define JAX_BNAR_CUDA_HOST_TILING_H_

#include <cstdint>

#include "cuda/host/parameters.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// The most columns of partial sums, of all slabs and blocks together, of teams
// of several blocks. This limits their messages to 16 MiB; what
// each channel needs besides is in BoundOfWorkspace.
constexpr int64_t kPartialColumns = int64_t{1} << 18;

// A line of L2 and of L1. It consists of sectors of 32 bytes that are fetched
// one by one.
constexpr int64_t kLineBytes = 128;

// Clusters of more blocks are not portable.
constexpr int kMaxCluster = 8;

constexpr int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t RoundDown(int64_t a, int64_t to) { return a - a % to; }
constexpr int64_t RoundUp(int64_t a, int64_t to) {
  return RoundDown(a + to - 1, to);
}

// The most columns of a slab that the planner chooses: rows of more than 512
// bytes are served no faster.
int WidestColumns(DType dtype);

// The channels of slabs whose rows are read and not written: one line of L2,
// which memory reads nearly as fast as several.
int ColumnsOfLine(DType dtype);

// Returns the smallest power of two that is at least n, or `at_most`.
int32_t PowerOfTwoAtLeast(int64_t n, int32_t at_most);

// Returns where the channels of a canonical array lie.
Layout LayoutOf(const Shape& shape);

// Returns how many elements threads may read at once: kWidth if all buffers are
// aligned (`aligned`) and every vector in them then is too, and otherwise 1.
int WidthOf(const Problem& problem, bool aligned);

// Returns the Problem::mask_channels with which warps write long pieces of the
// mask, whichever slabs the planner chooses, or 0 if there is no such number.
int64_t MaskChannels(const Shape& shape);

// Cuts slabs of at most `columns` channels. SetTeam adds the teams.
Tiling CutSlabs(const Shape& shape, int width, int columns = kMaxColumns,
                int64_t mask_channels = 0);

// Returns Tiling::word_step for the slabs of a tiling: the most threads that
// can share vectors, all of a row of a slab in most shapes.
int WordStep(const Problem& problem, int width, const Tiling& tiling);

// Returns whether slabs of half the channels make sense. If their rows were
// shorter than what memory fetches at once, it would fetch what another slab
// needs later.
bool CanCutNarrower(const Problem& problem, int width, const Tiling& tiling);

// Returns the bytes of a tile that holds so many arrays.
int64_t TileBytes(const Problem& problem, int width, int arrays);

int64_t TilesOfSlab(const Tiling& tiling);

// Returns the most blocks of a team whose partial sums fit into the workspace.
int64_t LargestTeam(const Tiling& tiling);

// Shares the tiles of a slab among at most `team` blocks, each of which gets
// one.
void SetTeam(int64_t team, Tiling* tiling);

// The same for exactly `team` blocks, of which the last may get none.
void SetWholeTeam(int64_t team, Tiling* tiling);

// Returns whether the elementwise pass of forward goes along memory without
// regard to planes, because their size is not a multiple of a vector. If it
// took a channel at a time, element by element, blocks would have too little in
// flight on planes of 7x7.
bool IsFlat(const Problem& problem, bool aligned);

FlatTiling CutFlat(const Problem& problem);

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_TILING_H_
