// How the array is cut into what blocks work on: plain host code, no CUDA.

#ifndef JAX_BNAR_CUDA_HOST_TILING_H_
#define JAX_BNAR_CUDA_HOST_TILING_H_

#include <cstdint>

#include "cuda/host/parameters.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// Columns of partial sums of all slabs and blocks together. Bounds the
// workspace at 16 MiB for any number of channels.
constexpr int64_t kPartialColumns = int64_t{1} << 18;

// A cluster of more blocks is not portable.
constexpr int kMaxCluster = 8;

constexpr int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

int32_t PowerOfTwoAtLeast(int64_t n, int32_t at_most);

// Where the channels of a canonical array lie.
Layout LayoutOf(const Shape& shape);

// Elements that threads may read at once: kWidth where every vector is aligned,
// if the buffers are (`aligned`), else 1.
int WidthOf(const Problem& problem, bool aligned);

// Slabs of so many channels at most, in rows layout; teams come later.
Tiling CutSlabs(const Shape& shape, int width, int columns = kMaxColumns);

// Whether slabs of half the channels are any good: of shorter pieces of rows
// than it fetches, memory would move what another slab wants later.
bool CanCutNarrower(const Problem& problem, int width, const Tiling& tiling);

int64_t TilesOfSlab(const Tiling& tiling);

// The most blocks whose partial sums the workspace holds.
int64_t LargestTeam(const Tiling& tiling);

// Shares the rows of a slab among at most `team` blocks, in whole tiles.
void SetTeam(int64_t team, Tiling* tiling);

int64_t TilesPerBlock(const Tiling& tiling);

// Whether the elementwise pass of forward goes along memory without regard to
// planes, which no vector divides. Element by element, a channel at a time, a
// block of 7x7 planes would have too little under way.
bool IsFlat(const Problem& problem, bool aligned);

FlatTiling CutFlat(const Problem& problem);

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_TILING_H_
