#include "cuda/settings.h"

#include <cstdlib>
#include <string_view>

namespace jax_bnar {
namespace gpu {
namespace {

constexpr const char* kNames[kStrategies] = {"auto", "on_chip", "cluster", "l2",
                                             "two_kernels"};

// What a variable holds, or null where it is not set or empty.
const char* Given(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == '\0' ? nullptr : text;
}

// Whether the text is a number in [least, most], and which.
bool ReadNumber(const char* text, long least, long most, int* number) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  *number = static_cast<int>(value);
  return *end == '\0' && least <= value && value <= most;
}

}  // namespace

const char* NameOf(Strategy strategy) {
  return kNames[static_cast<int>(strategy)];
}

std::string ReadSettings(Settings* settings) {
  *settings = Settings{};
  if (const char* strategy = Given("JAX_BNAR_CUDA_STRATEGY")) {
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
  if (const char* margin = Given("JAX_BNAR_CUDA_MARGIN")) {
    if (!ReadNumber(margin, 0, 100000, &settings->margin)) {
      return std::string(
                 "JAX_BNAR_CUDA_MARGIN must be a number of "
                 "multiprocessors >= 0, got '") +
             margin + "'";
    }
  }
  if (const char* channels = Given("JAX_BNAR_CUDA_SLAB_CHANNELS")) {
    int& number = settings->slab_channels;
    if (!ReadNumber(channels, kWidth, kMaxColumns, &number) ||
        (number & (number - 1)) != 0) {
      return std::string(
                 "JAX_BNAR_CUDA_SLAB_CHANNELS must be 8, 16, 32 or 64, "
                 "got '") +
             channels + "'";
    }
  }
  return "";
}

}  // namespace gpu
}  // namespace jax_bnar
