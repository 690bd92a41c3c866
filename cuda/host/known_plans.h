// Plans that have been made before. Comparing all plans under all models takes
// tens of microseconds, and a program calls the same operations in each step.

#ifndef JAX_BNAR_CUDA_HOST_KNOWN_PLANS_H_
#define JAX_BNAR_CUDA_HOST_KNOWN_PLANS_H_

#include "cuda/host/plan.h"
#include "native/problem.h"

namespace jax_bnar {
namespace cuda {

// Returns what MakePlan returns for PlannedModels(), and remembers it for as
// long as the process lives. Any thread may call it.
Plan KnownPlan(const Problem& problem, int width, const Traffic& traffic,
               const Device& device, const Settings& settings);

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_HOST_KNOWN_PLANS_H_
