#include "cpu/context.h"

#include "cpu/cache.h"
#include "cpu/dispatch.h"

namespace jax_bnar::cpu {

Context::Context(const Problem& problem, int inputs, bool residual)
    : dtype(problem.dtype),
      item_size(ItemSize(problem.dtype)),
      out_item_size(ItemSize(problem.out_dtype)),
      accumulator_size(problem.dtype == DType::kFloat64 ? 8 : 4),
      plan(MakePlan(problem.shape, item_size)),
      kernels(&KernelsFor(problem.dtype, problem.out_dtype)),
      array_bytes(problem.shape.size() * item_size),
      out_array_bytes(problem.shape.size() * out_item_size),
      fits_cache(BytesOfStep(inputs, residual, array_bytes, out_array_bytes) <=
                 kCacheBytes) {}

}  // namespace jax_bnar::cpu
