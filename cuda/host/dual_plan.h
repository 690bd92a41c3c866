// The plans of the operations with two normalised inputs: plain host code, no
// CUDA.
//
// Each slab exists twice, in x1 and in x2. The tiling of a dual plan counts
// both: slab 2i lies in x1 and slab 2i + 1 at the same place in x2, and each of
// them has its own partial sums and totals in the workspace, which is therefore
// that of twice as many groups.

#ifndef JAX_BNAR_CUDA_HOST_DUAL_PLAN_H_
#define JAX_BNAR_CUDA_HOST_DUAL_PLAN_H_

#include <cstdint>

#include "cuda/host/parameters.h"
#include "cuda/host/plan.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// The sums and the constants of x2 in shared memory
// (device/dual_shared_memory.cuh).
constexpr int64_t kSecondSharedBytes =
    static_cast<int64_t>(sizeof(Sums)) * 2 * kMaxColumns +
    static_cast<int64_t>(sizeof(double)) * kConstants * kMaxColumns;

// What the two passes move, in arrays of the size of x1: x1 and x2 or e, x1 and
// x2 wait between them.
Traffic DualForwardTraffic(DType dtype, bool has_mask);
Traffic DualBackwardTraffic(DType dtype, Gate gate);

// The statistics of x1 and of x2: a team has a slab of one of them at a time.
Plan PlanDualStatistics(const Problem& problem, int width, const Device& device,
                        const Settings& settings);

// The sums of backward, or an elementwise pass: a team goes through a slab of
// x1 and that of x2 at the same time.
Plan PlanDualReduction(const Problem& problem, int width, const Device& device,
                       const Settings& settings);
Plan PlanDualElementwise(const Problem& problem, int width,
                         const Device& device, const Settings& settings);

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_DUAL_PLAN_H_
