// Sizes in shared memory that the planner needs too.

#ifndef JAX_BNAR_CUDA_SHARED_MEMORY_H_
#define JAX_BNAR_CUDA_SHARED_MEMORY_H_

#include <cstdint>

#include "cuda/parameters.h"

namespace jax_bnar {
namespace gpu {

// One value for each warp and column, or for each part and column.
constexpr int kScratch = kWarps * kMaxColumns;
// Vectors of the elementwise pass: mean, a, b or bias, k, bias.
constexpr int kConstants = 5;

constexpr int64_t kFixedSharedBytes =
    static_cast<int64_t>(sizeof(Sums)) * (kScratch + 2 * kMaxColumns) +
    static_cast<int64_t>(sizeof(double)) * kConstants * kMaxColumns;

inline int64_t SharedBytes(int shared_tiles, int64_t tile_bytes) {
  return kFixedSharedBytes + shared_tiles * tile_bytes;
}

}  // namespace gpu
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_SHARED_MEMORY_H_
