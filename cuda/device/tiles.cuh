// How a block goes through its tiles where threads load them into registers.

#ifndef JAX_BNAR_CUDA_DEVICE_TILES_CUH_
#define JAX_BNAR_CUDA_DEVICE_TILES_CUH_

#include <cuda_runtime.h>

#include "cuda/device/intrinsics.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// A thread accumulates the sums of at most this many tiles in its own dtype
// before they are added in double. This bounds the rounding error of float
// sums.
constexpr int kFlushTiles = 256;

// The number of tiles for which a thread has loads in flight when each tile has
// kArrays vectors. Memory is busy when a thread has 64 bytes in flight, which
// is 32 KB on a multiprocessor. A single element takes a register, as four
// bytes of a vector do.
constexpr int kSinglesInFlight = kShortOfRegisters ? 2 : 8;
template <typename T, int kElements, int kArrays>
constexpr int kInFlight =
    kElements == 1
        ? (kArrays < kSinglesInFlight ? kSinglesInFlight / kArrays : 1)
    : sizeof(T) == 4 ? (kArrays == 1 ? 2 : 1)
    : kArrays == 1   ? 4
    : kArrays == 2   ? 2
                     : (kShortOfRegisters ? 1 : 2);

// An item that needs no load.
struct Nothing {};

// How often the body of a loop over items is compiled: once more for most of
// the items, in a loop that has no test for each of them, or not. A body that
// computes any activation from x is long, and a test is a small part of it.
enum class Copies { kMany, kFew };

// Loads and uses `count` items in order, with kDepth loads in flight ahead of
// each use, so that a thread that waits for memory waits for its oldest load.
// load(&item) and use(item) keep track of their own positions.
template <int kDepth, typename Item, Copies kCopies = Copies::kMany,
          typename Load, typename Use>
__device__ __forceinline__ void ForEachTile(int count, Load load, Use use) {
  Item ring[kDepth];
#pragma unroll
  for (int k = 0; k < kDepth; ++k) {
    if (k < count) load(&ring[k]);
  }
  // This loop has no test for each item. It runs as long as there are enough
  // items.
  if constexpr (kCopies == Copies::kMany) {
#pragma unroll 1
    for (; count >= 2 * kDepth; count -= kDepth) {
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        use(ring[k]);
        load(&ring[k]);
      }
    }
  }
#pragma unroll 1
  for (; count > 0; count -= kDepth) {
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      if (k < count) use(ring[k]);
      if (k + kDepth < count) load(&ring[k]);
    }
  }
}

// Goes through the tiles of a first pass: use(begin, end). flush() is called
// after at most kFlushTiles tiles and at the end.
template <typename Use, typename Flush>
__device__ __forceinline__ void ForEachPart(int tiles, Use use, Flush flush) {
  int begin = 0;
  do {
    const int end = min(tiles, begin + kFlushTiles);
    use(begin, end);
    flush();
    begin = end;
  } while (begin < tiles);
}

// The same where loads go to registers. The first `shared_tiles` tiles stay in
// shared memory: kept(begin, end). The others are read twice: streamed(begin,
// end). They come last, and the second pass starts with them and goes
// backwards, because L2 has had the least time to evict the last ones.
template <typename Kept, typename Streamed, typename Flush>
__device__ __forceinline__ void ForEachSegment(int shared_tiles, int tiles,
                                               Kept kept, Streamed streamed,
                                               Flush flush) {
  ForEachPart(
      tiles,
      [&](int begin, int end) {
        const int border = min(max(shared_tiles, begin), end);
        if (begin < border) kept(begin, border);
        if (border < end) streamed(border, end);
      },
      flush);
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_TILES_CUH_
