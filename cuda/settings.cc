#include "cuda/settings.h"

#include <cstdlib>
#include <string_view>

namespace jax_bnar {
namespace gpu {
namespace {

constexpr const char* kNames[kStrategies] = {"auto", "on_chip", "cluster", "l2",
                                             "two_kernels"};

}  // namespace

const char* NameOf(Strategy strategy) {
  return kNames[static_cast<int>(strategy)];
}

std::string ReadSettings(Settings* settings) {
  *settings = Settings{};
  const char* strategy = std::getenv("JAX_BNAR_CUDA_STRATEGY");
  if (strategy != nullptr && *strategy != '\0') {
    bool known = false;
    for (int i = 0; i < kStrategies; ++i) {
      if (std::string_view(kNames[i]) == strategy) {
        settings->strategy = static_cast<Strategy>(i);
        known = true;
      }
    }
    if (!known) {
      return std::string(
                 "JAX_BNAR_CUDA_STRATEGY must be 'auto', 'on_chip', "
                 "'cluster', 'l2' or 'two_kernels', got '") +
             strategy + "'";
    }
  }
  const char* margin = std::getenv("JAX_BNAR_CUDA_MARGIN");
  if (margin != nullptr && *margin != '\0') {
    char* end = nullptr;
    const long value = std::strtol(margin, &end, 10);
    if (*end != '\0' || value < 0 || value > 100000) {
      return std::string(
                 "JAX_BNAR_CUDA_MARGIN must be a number of "
                 "multiprocessors >= 0, got '") +
             margin + "'";
    }
    settings->margin = static_cast<int>(value);
  }
  const char* channels = std::getenv("JAX_BNAR_CUDA_SLAB_CHANNELS");
  if (channels != nullptr && *channels != '\0') {
    char* end = nullptr;
    const long value = std::strtol(channels, &end, 10);
    if (*end != '\0' || value < kWidth || value > kMaxColumns ||
        (value & (value - 1)) != 0) {
      return std::string(
                 "JAX_BNAR_CUDA_SLAB_CHANNELS must be 8, 16, 32 or 64, "
                 "got '") +
             channels + "'";
    }
    settings->slab_channels = static_cast<int>(value);
  }
  return "";
}

}  // namespace gpu
}  // namespace jax_bnar
