#include "cpu/cache.h"
#include "cpu/dispatch.h"
#include "cpu/half.h"
#include "cpu/passes.h"

namespace jax_bnar::cpu {

double ElementAsDouble(DType dtype, const void* array, int64_t index) {
  switch (dtype) {
    case DType::kFloat16:
      return HalfToFloat(static_cast<const uint16_t*>(array)[index]);
    case DType::kBFloat16:
      return BitsToFloat(
          static_cast<uint32_t>(static_cast<const uint16_t*>(array)[index])
          << 16);
    case DType::kFloat32:
      return static_cast<const float*>(array)[index];
    default:
      return static_cast<const double*>(array)[index];
  }
}

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
