// Counts how often each kernel was launched, and by which strategy. If the
// device has no room for one strategy, another is used silently; these counts
// tell tests and benchmarks which one ran.

#ifndef JAX_BNAR_CUDA_LAUNCH_LAUNCH_COUNTS_H_
#define JAX_BNAR_CUDA_LAUNCH_LAUNCH_COUNTS_H_

#include <cstdint>
#include <map>
#include <string>

#include "cuda/host/plan.h"

namespace jax_bnar {
namespace cuda {

enum class Kernel {
  kForward,
  kStatistics,
  kNormalise,
  kNormaliseFlat,
  kPackMask,
  kBackward,
  kBackwardReduce,
  kBackwardApply,
  kDualStatistics,
  kDualNormalise,
  kDualBackwardReduce,
  kDualBackwardApply
};

const char* NameOf(Kernel kernel);

void CountLaunch(Kernel kernel, Strategy strategy);

// Returns ("Forward cluster", 3) and so on for this process. A kernel in a CUDA
// graph counts when it is captured, not when the graph is replayed.
std::map<std::string, int64_t> LaunchCounts();

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_LAUNCH_LAUNCH_COUNTS_H_
