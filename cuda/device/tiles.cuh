// Which tiles of a block stay on chip between the two passes, and where.

#ifndef JAX_BNAR_CUDA_DEVICE_TILES_CUH_
#define JAX_BNAR_CUDA_DEVICE_TILES_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/shared_memory.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// Tiles whose sums a thread takes in the accumulation dtype before they are
// added in double: bounds the rounding of float sums.
constexpr int kFlushTiles = 256;

// Vectors in flight: half as many where a vector has 32 bytes instead of 16.
// Single elements take a register each, as four bytes of a vector do.
template <typename T, int kElements, int kVectors>
constexpr int kBatchOf = kElements == 1   ? 4 * kVectors
                         : sizeof(T) == 4 ? kVectors / 2
                                          : kVectors;

// Tiles [0, shared_begin) are read twice, [shared_begin, held_begin) stay in
// shared memory, the last ones in registers.
struct TilePlacement {
  __device__ __forceinline__ TilePlacement(int tiles, int held,
                                           int shared_tiles)
      : held_begin(tiles > held ? tiles - held : 0),
        shared_begin(held_begin > shared_tiles ? held_begin - shared_tiles
                                               : 0) {}
  int held_begin;
  int shared_begin;
};

template <typename T, int kElements, int kHeld>
struct Held {
  Vector<T, kElements> vectors[kHeld > 0 ? kHeld : 1];
};

// A tile in shared memory: its first words of all threads, then its second
// ones, so that a warp's accesses hit all banks alike.
template <typename T, int kElements>
__device__ __forceinline__ typename Vector<T, kElements>::Word* TileWord(
    const SharedMemory& shared, int tile, int word) {
  using V = Vector<T, kElements>;
  return reinterpret_cast<typename V::Word*>(shared.tiles) +
         (static_cast<int64_t>(tile) * V::kWords + word) * kThreads +
         threadIdx.x;
}

template <typename T, int kElements>
__device__ __forceinline__ void StoreTile(const SharedMemory& shared, int tile,
                                          const Vector<T, kElements>& vector) {
#pragma unroll
  for (int w = 0; w < Vector<T, kElements>::kWords; ++w) {
    *TileWord<T, kElements>(shared, tile, w) = vector.words[w];
  }
}

template <typename T, int kElements>
__device__ __forceinline__ Vector<T, kElements> LoadTile(
    const SharedMemory& shared, int tile) {
  Vector<T, kElements> vector;
#pragma unroll
  for (int w = 0; w < Vector<T, kElements>::kWords; ++w) {
    vector.words[w] = *TileWord<T, kElements>(shared, tile, w);
  }
  return vector;
}

// The team that a block belongs to, and its place there.
struct BlockPosition {
  __device__ __forceinline__ BlockPosition(const Tiling& tiling,
                                           bool last_first) {
    // Blocks start in order: the first ones find what was read last.
    const unsigned block = last_first ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    team = block / static_cast<unsigned>(tiling.team);
    rank = static_cast<int>(block - team * tiling.team);
  }
  unsigned team;
  int rank;
};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_TILES_CUH_
