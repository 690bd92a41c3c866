// Devices of different sizes for the tests of the planner, which need no GPU.

#ifndef JAX_BNAR_TESTS_NATIVE_CUDA_DEVICES_H_
#define JAX_BNAR_TESTS_NATIVE_CUDA_DEVICES_H_

#include <cstdint>

#include "cuda/host/plan.h"
#include "cuda/host/tiling.h"
#include "native/problem.h"

namespace jax_bnar {
namespace testing {

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;

// The devices as they describe themselves.
constexpr cuda::Device kHopper = {132,       228 * kKiB, 227 * kKiB, kKiB,
                                  50 * kMiB, true,       true};
constexpr cuda::Device kAmpere = {108,       164 * kKiB, 163 * kKiB, kKiB,
                                  40 * kMiB, true,       false};
constexpr cuda::Device kSmall = {2,        100 * kKiB, 99 * kKiB, kKiB,
                                 2 * kMiB, true,       false};
// It has no room for two stages of vectors.
constexpr cuda::Device kCramped = {2,        64 * kKiB, 48 * kKiB, kKiB,
                                   2 * kMiB, true,      false};
constexpr cuda::Device kLone = {132,       228 * kKiB, 227 * kKiB, kKiB,
                                50 * kMiB, false,      false};

struct Named {
  const char* name;
  cuda::Device device;
};
constexpr Named kDevices[] = {{"Hopper", kHopper},
                              {"Ampere", kAmpere},
                              {"small", kSmall},
                              {"cramped", kCramped},
                              {"without cooperation", kLone}};
constexpr cuda::Strategy kStrategies[] = {
    cuda::Strategy::kAuto, cuda::Strategy::kOnChip, cuda::Strategy::kCluster,
    cuda::Strategy::kTwoKernels};

inline int ArraysKept(bool backward) {
  return backward ? cuda::kBackwardArrays : cuda::kForwardArrays;
}

// Returns the plan of a whole operation whose buffers are aligned.
inline cuda::Plan PlanOf(const Shape& shape, const cuda::Device& device,
                         cuda::Strategy strategy = cuda::Strategy::kAuto,
                         bool backward = false, DType dtype = DType::kBFloat16,
                         int slab_channels = 0, int teams = 0) {
  const Problem problem{shape, dtype};
  const int width = cuda::WidthOf(problem, true);
  return cuda::MakePlan(problem, width, ArraysKept(backward), device,
                        {strategy, 0, slab_channels, teams});
}

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_CUDA_DEVICES_H_
