#include "cuda/host/settings.h"

#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <string_view>

namespace jax_bnar {
namespace cuda {
namespace {

constexpr std::string_view kPrefix = "JAX_BNAR_CUDA_";

// Reads a number in [least, most]; false if the text is none.
bool ReadNumber(const char* text, long least, long most, int* number) {
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  *number = static_cast<int>(value);
  return *end == '\0' && least <= value && value <= most;
}

// Returns what a value of the variable JAX_BNAR_CUDA_<name> should be, or an
// empty string if it is valid.
std::string ReadSetting(std::string_view name, const char* value,
                        Settings* settings) {
  if (name == "STRATEGY") {
    if (FindStrategy(value, &settings->strategy)) return "";
    return "must be 'auto', 'on_chip', 'cluster' or 'two_kernels'";
  }
  if (name == "SM_MARGIN") {
    if (ReadNumber(value, 0, 100000, &settings->sm_margin)) return "";
    return "must be a number of multiprocessors >= 0";
  }
  if (name == "SLAB_CHANNELS") {
    int& number = settings->slab_channels;
    if (ReadNumber(value, kWidth, kMaxColumns, &number) &&
        (number & (number - 1)) == 0) {
      return "";
    }
    return "must be a power of 2 from 8 to " + std::to_string(kMaxColumns);
  }
  if (name == "TEAMS") {
    if (ReadNumber(value, 1, 100000, &settings->teams)) return "";
    return "must be a number of teams >= 1";
  }
  if (name == "ZERO_WORKSPACE") {
    int number = 0;
    if (!ReadNumber(value, 0, 1, &number)) return "must be 0 or 1";
    settings->zero_workspace = number == 1;
    return "";
  }
  return "is not known: there are JAX_BNAR_CUDA_STRATEGY, "
         "JAX_BNAR_CUDA_SM_MARGIN, JAX_BNAR_CUDA_SLAB_CHANNELS, "
         "JAX_BNAR_CUDA_TEAMS and JAX_BNAR_CUDA_ZERO_WORKSPACE";
}

struct Known {
  std::mutex mutex;
  bool read = false;
  Settings settings;
  std::string wrong;
};

Known& GetKnown() {
  static auto* known = new Known;
  return *known;
}

}  // namespace

std::string ReadSettings(Settings* settings) {
  *settings = Settings{};
  // Walking through all variables also finds one that is misspelt, which getenv
  // would not.
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view variable = *entry;
    if (variable.compare(0, kPrefix.size(), kPrefix) != 0) continue;
    const size_t equals = variable.find('=');
    if (equals == std::string_view::npos) continue;
    const std::string_view name =
        variable.substr(kPrefix.size(), equals - kPrefix.size());
    const char* value = *entry + equals + 1;
    if (*value == '\0') continue;  // counts as not set
    const std::string wrong = ReadSetting(name, value, settings);
    if (!wrong.empty()) {
      return std::string(variable.substr(0, equals)) + " " + wrong + ", got '" +
             value + "'";
    }
  }
  return "";
}

std::string KnownSettings(Settings* settings) {
  Known& known = GetKnown();
  const std::lock_guard<std::mutex> lock(known.mutex);
  if (!known.read) {
    known.wrong = ReadSettings(&known.settings);
    known.read = true;
  }
  *settings = known.settings;
  return known.wrong;
}

void ForgetSettings() {
  Known& known = GetKnown();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.read = false;
}

}  // namespace cuda
}  // namespace jax_bnar
