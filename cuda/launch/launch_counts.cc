#include "cuda/launch/launch_counts.h"

#include <atomic>

#include "cuda/host/settings.h"

namespace jax_bnar {
namespace cuda {
namespace {

constexpr const char* kKernelNames[] = {
    "Forward",        "Statistics",         "Normalise",
    "NormaliseFlat",  "PackMask",           "Backward",
    "BackwardReduce", "BackwardApply",      "DualStatistics",
    "DualNormalise",  "DualBackwardReduce", "DualBackwardApply"};
constexpr int kKernels = sizeof(kKernelNames) / sizeof(kKernelNames[0]);
static_assert(kKernels == static_cast<int>(Kernel::kDualBackwardApply) + 1,
              "a name for each kernel");

std::atomic<int64_t> counts[kKernels][kStrategies];

}  // namespace

const char* NameOf(Kernel kernel) {
  return kKernelNames[static_cast<int>(kernel)];
}

void CountLaunch(Kernel kernel, Strategy strategy) {
  counts[static_cast<int>(kernel)][static_cast<int>(strategy)].fetch_add(
      1, std::memory_order_relaxed);
}

std::map<std::string, int64_t> LaunchCounts() {
  std::map<std::string, int64_t> result;
  for (int kernel = 0; kernel < kKernels; ++kernel) {
    for (int strategy = 0; strategy < kStrategies; ++strategy) {
      const int64_t count =
          counts[kernel][strategy].load(std::memory_order_relaxed);
      if (count == 0) continue;
      const char* name = NameOf(static_cast<Strategy>(strategy));
      result[std::string(kKernelNames[kernel]) + " " + name] = count;
    }
  }
  return result;
}

}  // namespace cuda
}  // namespace jax_bnar
