// Tests how the variables JAX_BNAR_CUDA_... are read.

#include <cstdlib>
#include <string>

#include "cuda/host/settings.h"
#include "tests/native/check.h"

namespace jax_bnar {
namespace testing {
namespace {

using cuda::Settings;
using cuda::Strategy;

void TestSettings() {
  context = "settings";
  const auto read = [](const char* strategy, const char* sm_margin,
                       Settings* settings, const char* slab_channels = "") {
    setenv("JAX_BNAR_CUDA_STRATEGY", strategy, 1);
    setenv("JAX_BNAR_CUDA_SM_MARGIN", sm_margin, 1);
    setenv("JAX_BNAR_CUDA_SLAB_CHANNELS", slab_channels, 1);
    return cuda::ReadSettings(settings);
  };
  Settings settings;
  BNAR_CHECK(read("", "", &settings).empty() &&
                 settings.strategy == Strategy::kAuto &&
                 settings.sm_margin == 0 && settings.slab_channels == 0,
             "defaults");
  BNAR_CHECK(read("cluster", "12", &settings, "32").empty() &&
                 settings.strategy == Strategy::kCluster &&
                 settings.sm_margin == 12 && settings.slab_channels == 32,
             "values");
  BNAR_CHECK(read("fast", "", &settings).find("'fast'") != std::string::npos,
             "unknown strategy");
  for (const char* sm_margin : {"-1", "two", "1.5", "99999999999999999999"}) {
    BNAR_CHECK(
        read("", sm_margin, &settings).find(sm_margin) != std::string::npos,
        sm_margin);
  }
  // A former name of SM_MARGIN. It is written in two pieces, because it must
  // not be in the table of variables.
  constexpr char kUnknown[] =
      "JAX_BNAR_CUDA_"
      "MARGIN";
  setenv(kUnknown, "2", 1);
  BNAR_CHECK(
      read("", "", &settings).find(std::string(kUnknown) + " is not known") ==
          0,
      "a name that nobody reads");
  unsetenv(kUnknown);
  setenv("JAX_BNAR_CUDA_ZERO_WORKSPACE", "1", 1);
  BNAR_CHECK(read("", "", &settings).empty() && settings.zero_workspace,
             "the workspace is zeroed");
  setenv("JAX_BNAR_CUDA_ZERO_WORKSPACE", "yes", 1);
  BNAR_CHECK(read("", "", &settings).find("ZERO_WORKSPACE must be 0 or 1") !=
                 std::string::npos,
             "a value that is not known");
  unsetenv("JAX_BNAR_CUDA_ZERO_WORKSPACE");
  BNAR_CHECK(read("", "", &settings).empty() && !settings.zero_workspace,
             "the workspace is left as it is");
  setenv("JAX_BNAR_CUDA_TEAMS", "3", 1);
  BNAR_CHECK(read("", "", &settings).empty() && settings.teams == 3, "");
  for (const char* teams : {"0", "-1", "some", "1.5"}) {
    setenv("JAX_BNAR_CUDA_TEAMS", teams, 1);
    BNAR_CHECK(
        read("", "", &settings).find("TEAMS must be a number of teams") !=
            std::string::npos,
        teams);
  }
  unsetenv("JAX_BNAR_CUDA_TEAMS");
  BNAR_CHECK(read("", "", &settings).empty() && settings.teams == 0,
             "the planner's choice");
  for (const int channels : {8, 16, 32, 64, 128, 256}) {
    const std::string text = std::to_string(channels);
    BNAR_CHECK(read("", "", &settings, text.c_str()).empty() &&
                   settings.slab_channels == channels,
               text);
  }
  for (const char* channels :
       {"0", "-8", "4", "24", "192", "512", "many", "8.0"}) {
    const std::string wrong = read("", "", &settings, channels);
    BNAR_CHECK(
        wrong.find("SLAB_CHANNELS must be a power of 2 from 8 to 256, got '" +
                   std::string(channels)) != std::string::npos,
        channels);
  }
}

// Calls keep what the first one has read, because another thread may change the
// environment meanwhile.
void TestKnownSettings() {
  context = "known settings";
  Settings settings;
  unsetenv("JAX_BNAR_CUDA_SLAB_CHANNELS");
  setenv("JAX_BNAR_CUDA_STRATEGY", "cluster", 1);
  cuda::ForgetSettings();
  BNAR_CHECK(cuda::KnownSettings(&settings).empty() &&
                 settings.strategy == Strategy::kCluster,
             "as they are");
  setenv("JAX_BNAR_CUDA_STRATEGY", "fast", 1);
  settings = {};
  BNAR_CHECK(cuda::KnownSettings(&settings).empty() &&
                 settings.strategy == Strategy::kCluster,
             "as they were");
  cuda::ForgetSettings();
  for (int i = 0; i < 2; ++i) {
    BNAR_CHECK(
        cuda::KnownSettings(&settings).find("'fast'") != std::string::npos,
        "an error stays");
  }
  unsetenv("JAX_BNAR_CUDA_STRATEGY");
  cuda::ForgetSettings();
  BNAR_CHECK(cuda::KnownSettings(&settings).empty() &&
                 settings.strategy == Strategy::kAuto,
             "as they are now");
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  TestSettings();
  TestKnownSettings();
  return Finish();
}
