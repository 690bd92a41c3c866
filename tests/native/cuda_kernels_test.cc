// Compares the CUDA kernels, which the host emulation runs, with plain loops:
// every strategy, on devices of different sizes.
//
// Arguments: the strategy ("auto", "on_chip", "cluster", "two_kernels"), and
// "few", "stream" or "many" for the shapes that a mutation is tried on.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/host/plan.h"
#include "cuda/host/settings.h"
#include "cuda/host/tiling.h"
#include "cuda/launch/launch.cuh"
#include "cuda/launch/launch_counts.h"
#include "tests/native/calls.h"
#include "tests/native/cuda_platform.h"
#include "tests/native/expectations.h"
#include "tests/native/operation_checks.h"

namespace jax_bnar {
namespace testing {
namespace {

// A device whose blocks keep `tiles` tiles of 4 KiB in shared memory, and whose
// L2 holds `l2_kib`.
cuda_emulation::Device DeviceOf(int multiprocessors, int tiles, int l2_kib) {
  cuda_emulation::Device device;
  device.sm_count = multiprocessors;
  const int per_block = 12800 + 4096 * tiles;
  device.shared_memory_per_sm =
      2 * (per_block + device.reserved_shared_memory_per_block);
  device.shared_memory_per_block_optin = per_block;
  device.l2_cache_size = l2_kib * 1024;
  return device;
}

struct Emulated {
  const char* name;
  cuda_emulation::Device device;
};

std::vector<Emulated> Devices() {
  return {{"3 multiprocessors", DeviceOf(3, 12, 64)},
          {"1 multiprocessor", DeviceOf(1, 8, 8)}};
}

void TestCase(Case c, const cuda::Settings& settings, Calls calls) {
  CudaPlatform platform(settings);
  // The operations with two inputs do not depend on the strategy.
  const int most_inputs = calls == Calls::kAll ? 2 : 1;
  for (c.inputs = 1; c.inputs <= most_inputs; ++c.inputs) {
    const Inputs in(c);
    CheckForwardCalls(platform, in, c.Name(), calls);
    CheckBackwardCalls(platform, in, c.Name(), calls);
    CheckInputsAreUntouched(in, Inputs(c), c.Name());
  }
}

// The strategy does not change the halves.
Calls CallsOf(const cuda::Settings& settings) {
  return settings.strategy == cuda::Strategy::kTwoKernels ? Calls::kAll
                                                          : Calls::kWholePasses;
}

void TestShapes(const std::vector<Shape>& shapes,
                const std::vector<DType>& dtypes,
                const cuda::Settings& settings) {
  const Calls calls = CallsOf(settings);
  for (const Shape& shape : shapes) {
    for (const DType dtype : dtypes) {
      // An array that is not aligned is read element by element.
      TestCase({shape, dtype, 0, 0, true}, settings, calls);
    }
    TestCase({shape, dtypes[0], 1, 1, false}, settings, calls);
  }
}

int64_t LaunchesOf(const char* kernel) {
  const auto counts = cuda::LaunchCounts();
  const auto found = counts.find(kernel);
  return found == counts.end() ? 0 : found->second;
}

// Takes the place of the device, of which the kernels' host code remembers what
// PrepareKernels has found out.
void Use(const cuda_emulation::Device& device) {
  cuda_emulation::SetDevice(device);
  BNAR_CHECK(cuda::PrepareKernels() == cudaSuccess,
             cuda_emulation::LastMessage());
}

// Teams with fewer blocks than columns and with more, in which part of a warp,
// a warp, several warps or a block adds a column. The largest ones take long,
// and the stacks of their threads too much memory under AddressSanitizer.
void TestTeams(cuda::Settings settings) {
#ifdef BNAR_TEST_ADDRESS_SANITIZER
  constexpr int kMostMultiprocessors = 20;
#else
  constexpr int kMostMultiprocessors = 132;
#endif
  for (const int multiprocessors : {1, 3, 20, 70, 132}) {
    if (multiprocessors > kMostMultiprocessors) break;
    Use(DeviceOf(multiprocessors, 4, 64));
    const int64_t tiles = 2 * multiprocessors;
    const int64_t before = LaunchesOf("Forward on_chip");
    const Case narrow{{1, tiles * 256 - 3, 8, 1}, DType::kFloat32, 0, 0, true};
    const Case wide{{1, tiles * 32 - 3, 64, 1}, DType::kBFloat16, 0, 0, true};
    if (multiprocessors < 70) {
      TestCase(narrow, settings, Calls::kWholePasses);
      TestCase(wide, settings, Calls::kWholePasses);
    } else {
      CudaPlatform platform(settings);
      const Inputs in(wide);
      context = wide.Name() + " in a large team";
      CheckStatistics(in,
                      CallForward(platform, in, NormaliseOptionsOf(in.c)[0]));
    }
    BNAR_CHECK(LaunchesOf("Forward on_chip") > before, "two kernels");
    settings.zero_workspace = !settings.zero_workspace;
  }
}

// Arrays with fewer channels than a slab may have, so that a tile has more
// rows.
void TestNarrowSlabs(cuda::Settings settings) {
  for (const int channels : {8, 16, 32}) {
    settings.slab_channels = channels;
    TestCase({{1, 301, 72, 1}, DType::kBFloat16, 0, 0, true}, settings,
             Calls::kWholePasses);
    TestCase({{2, 90, 40, 1}, DType::kFloat32, 0, 0, false}, settings,
             Calls::kWholePasses);
  }
}

// Masks in either order, of several groups, written and read by eights and by
// single elements, and by slabs that have a part of the channels whose bits lie
// together.
void TestMasks(cuda::Settings settings) {
  const Calls calls = CallsOf(settings);
  const Shape shape{2, 75, 96, 1};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const int64_t mask_channels = cuda::MaskChannels(shape, ItemSize(dtype));
    BNAR_CHECK(mask_channels == (dtype == DType::kFloat32 ? 16 : 32), "");
    TestCase({shape, dtype, 0, 0, true, mask_channels}, settings, calls);
    TestCase({shape, dtype, 1, 1, false, mask_channels}, settings, calls);
  }
  settings.slab_channels = 8;
  TestCase({shape, DType::kBFloat16, 0, 0, true, 32}, settings, calls);
}

// Other activations than ReLU: by eights and by single elements, of slabs that
// stay on chip and of those that are read again, and along planes.
void TestCurves(cuda::Settings settings, bool few) {
  const Calls calls = CallsOf(settings);
  for (const Activation& activation : kCurves) {
    const auto test = [&](Case c) {
      c.activation = activation;
      TestCase(c, settings, calls);
    };
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      test({{1, 301, 72, 1}, dtype, 0, 0, true});
      if (few) continue;
      test({{2, 75, 96, 1},
            dtype,
            0,
            0,
            false,
            cuda::MaskChannels({2, 75, 96, 1}, ItemSize(dtype))});
      test({{1, 9, 2, 1200}, dtype, 0, 0, true});
    }
    if (few) continue;
    test({{1, 3000, 8, 1}, DType::kFloat16, 0, 0, true});
    test({{1, 9, 2, 1200}, DType::kFloat16, 0, 0, false});
    for (const DType dtype : kDTypes) test({{1, 67, 65, 1}, dtype, 1, 1, true});
    test({{2, 33, 16, 1}, DType::kFloat64, 0, 0, false});
    test({{1, 5, 3, 49}, DType::kBFloat16, 0, 0, true});
    test({{2, 4, 6, 9}, DType::kFloat32, 0, 0, true});
    test({{2, 4, 6, 9}, DType::kFloat64, 0, 0, true});
  }
}

// How many plans for vectors copy tiles of the next slab ahead, of slabs that
// fit on chip or do not.
struct StreamPlans {
  int fits = 0;
  int exceeds = 0;

  void Count(const Problem& problem, const cuda::Traffic& traffic,
             const cuda::Settings& settings) {
    cuda::Device device;
    BNAR_CHECK(cuda::QueryDevice(&device) == cudaSuccess, "");
    const cuda::Plan plan =
        cuda::MakePlan(problem, cuda::kWidth, traffic, device, settings);
    const cuda::Tiling& t = plan.tiling;
    if (t.tiles_ahead > 0) {
      ++(t.shared_tiles >= TilesPerBlock(t) ? fits : exceeds);
    }
  }
  std::string Text() const {
    return std::to_string(fits) + " and " + std::to_string(exceeds) + " plans";
  }
};

// Teams that take several slabs, with as many tiles as a block keeps, with
// fewer, so that there is room for those of the next slab, and with more, so
// that copies go round the ring of slots several times in each pass. With
// `few`, bfloat16 only.
void TestStream(cuda::Settings settings, bool few) {
  settings.slab_channels = 64;
  StreamPlans forward, backward;
  const int64_t before[] = {LaunchesOf("Forward on_chip"),
                            LaunchesOf("Backward on_chip")};
  struct Slots {
    int all;
    int ahead;
  };
  for (const Slots& slots :
       {Slots{16, 0}, Slots{16, 4}, Slots{16, 8}, Slots{32, 16}}) {
    Use(DeviceOf(2, slots.all, 64));
    settings.tiles_ahead = slots.ahead;
    // Stages of up to four tiles, the last of which have all numbers of tiles.
    for (const int tiles : {1, 7, 10, 37}) {
      const int64_t rows = 4 * 32 * tiles - 5;
      for (const Case& c :
           {Case{{1, rows, 5 * 64, 1}, DType::kBFloat16, 0, 0, true},
            Case{{1, rows, 3 * 64 - 8, 1}, DType::kFloat32, 0, 0, true},
            Case{{2, 4 * tiles, 3, 8 * 63}, DType::kFloat16, 0, 0, true}}) {
        if (few && c.dtype != DType::kBFloat16) continue;
        TestCase(c, settings, Calls::kWholePasses);
        // Another activation, which is another kernel, reads the same tiles.
        if (c.dtype == DType::kBFloat16 && tiles >= 10) {
          Case smooth = c;
          smooth.activation = {ActivationKind::kSilu};
          TestCase(smooth, settings, Calls::kWholePasses);
        }
        const Problem problem{c.shape, c.dtype};
        forward.Count(problem, cuda::kForwardArrays, settings);
        backward.Count(problem, cuda::kBackwardArrays, settings);
      }
    }
  }
  if (few) return;
  BNAR_CHECK(forward.fits >= 3 && forward.exceeds >= 19, forward.Text());
  BNAR_CHECK(backward.fits >= 6 && backward.exceeds >= 22, backward.Text());
  BNAR_CHECK(LaunchesOf("Forward on_chip") - before[0] >= 4 * 4 * 3 &&
                 LaunchesOf("Backward on_chip") - before[1] >= 4 * 4 * 3,
             "two kernels");
}

// More tiles than a thread adds in its own dtype.
void TestManyTiles(const cuda::Settings& settings) {
  Use(DeviceOf(1, 16, 64));
  const int64_t tiles = 2 * 300;  // of two blocks
  const int64_t before = LaunchesOf("Forward on_chip");
  CudaPlatform platform(settings);
  const Inputs in(
      Case{{1, tiles * 256 - 3, 8, 1}, DType::kBFloat16, 0, 0, true});
  context = "many tiles";
  CheckStatistics(in, CallForward(platform, in, NormaliseOptionsOf(in.c)[0]));
  BNAR_CHECK(LaunchesOf("Forward on_chip") > before, "two kernels");
}

// A launch may be refused although the occupancy was promised.
void TestRefusedCooperation(const cuda::Settings& settings) {
  cuda_emulation::Device device = DeviceOf(3, 8, 64);
  device.blocks_per_sm_not_had = 4;
  Use(device);
  const int64_t before[] = {LaunchesOf("Forward on_chip"),
                            LaunchesOf("Backward on_chip"),
                            LaunchesOf("Normalise two_kernels"),
                            LaunchesOf("BackwardApply two_kernels")};
  TestCase({{1, 301, 72, 1}, DType::kBFloat16, 0, 0, true}, settings,
           Calls::kWholePasses);
  BNAR_CHECK(LaunchesOf("Forward on_chip") == before[0] &&
                 LaunchesOf("Backward on_chip") == before[1] &&
                 LaunchesOf("Normalise two_kernels") > before[2] &&
                 LaunchesOf("BackwardApply two_kernels") > before[3],
             "two kernels take the place of a refused one");
}

int64_t FlatLaunches() { return LaunchesOf("NormaliseFlat two_kernels"); }

// Planes whose size is not a multiple of a vector: many in a block, and one
// that several blocks share; groups that end in the middle of a vector, and
// groups that do not.
void TestFlat(const std::vector<DType>& dtypes,
              const cuda::Settings& settings) {
  for (const Shape& shape :
       {Shape{1, 2, 3, 49}, Shape{1, 700, 2, 13}, Shape{1, 1, 2, 9001},
        Shape{2, 4, 6, 9}, Shape{1, 1, 5, 11}, Shape{1, 3, 1, 11}}) {
    for (const DType dtype : dtypes) {
      const int64_t before = FlatLaunches();
      TestCase({shape, dtype, 0, 0, true}, settings, Calls::kAll);
      BNAR_CHECK(FlatLaunches() > before, "planes were not taken as one run");
    }
  }
  // A vector that is not aligned, or whose first element belongs to another
  // group.
  const int64_t before = FlatLaunches();
  TestCase({{1, 2, 3, 49}, dtypes[0], 1, 1, false}, settings, Calls::kAll);
  TestCase({{2, 2, 3, 49}, dtypes[0], 0, 0, true}, settings, Calls::kAll);
  BNAR_CHECK(FlatLaunches() == before, "a vector that is not aligned");
}

void TestStrategy(const cuda::Settings& settings, bool few) {
  const std::vector<DType> all = {DType::kFloat16, DType::kBFloat16,
                                  DType::kFloat32, DType::kFloat64};
  const std::vector<DType> wide = {DType::kBFloat16, DType::kFloat32};
  for (const Emulated& emulated : Devices()) {
    Use(emulated.device);
    // The last tile is not full, and there are several tiles, slabs and teams.
    TestShapes({{1, 301, 72, 1}}, few ? wide : all, settings);
    TestMasks(settings);
    TestCurves(settings, few);
    if (few) return;
    TestShapes({{1, 1, 1, 1},
                {1, 17, 3, 1},
                {1, 67, 65, 1},
                {2, 33, 16, 1},
                {1, 3, 5, 16},
                {2, 2, 3, 49}},
               wide, settings);
    TestNarrowSlabs(settings);
    // A cluster of eight blocks, of which one has fewer rows, or none.
    TestShapes({{1, 1050, 72, 1}}, {DType::kBFloat16}, settings);
    // Some tiles stay in shared memory, and some do not.
    TestShapes({{1, 3000, 8, 1}, {1, 9, 2, 1200}}, {DType::kFloat16}, settings);
  }
  if (settings.strategy == cuda::Strategy::kOnChip) {
    TestTeams(settings);
    TestStream(settings, /*few=*/false);
    TestManyTiles(settings);
    TestRefusedCooperation(settings);
  }
  if (settings.strategy == cuda::Strategy::kTwoKernels) {
    TestFlat({DType::kFloat16, DType::kBFloat16, DType::kFloat32}, settings);
  }
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main(int argc, char** argv) {
  using namespace jax_bnar;
  setenv("JAX_BNAR_CUDA_STRATEGY", argc > 1 ? argv[1] : "auto", 1);
  cuda::Settings settings;
  const std::string wrong = cuda::ReadSettings(&settings);
  if (!wrong.empty()) {
    std::fprintf(stderr, "%s\n", wrong.c_str());
    return 2;
  }
  const std::string shapes = argc > 2 ? argv[2] : "all";
  if (shapes == "stream") {
    testing::TestStream(settings, /*few=*/true);
  } else if (shapes == "many") {
    testing::TestManyTiles(settings);
  } else {
    testing::TestStrategy(settings, shapes == "few");
  }
  return testing::Finish();
}
