// What a call needs besides its buffers.

#ifndef JAX_BNAR_CPU_CONTEXT_H_
#define JAX_BNAR_CPU_CONTEXT_H_

#include <cstdint>

#include "cpu/plan.h"
#include "cpu/tile_kernels.h"
#include "native/problem.h"

namespace jax_bnar::cpu {

// What every pass of one operation shares.
struct Context {
  Context(const Problem& problem, int inputs, bool residual);

  DType dtype;
  int64_t item_size;         // of x and dx
  int64_t out_item_size;     // of y, z, dy, dz and a saved y or z
  int64_t accumulator_size;  // of vectors
  Plan plan;
  const TileKernels* kernels;
  int64_t array_bytes;      // of x, of all groups
  int64_t out_array_bytes;  // of y
  // Whether all arrays of a training step fit in the cache together.
  bool fits_cache;

  int64_t mask_bytes_per_group() const {
    return plan.shape.mask_bytes_per_group();
  }
};

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_CONTEXT_H_
