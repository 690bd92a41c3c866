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

#include "cuda/host/parameters.h"
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
  const int per_block =
      static_cast<int>(cuda::kFixedSharedBytes) + 4096 * tiles;
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

// The plan of a pass whose buffers are aligned, on the emulated device.
cuda::Tiling TilingOf(const Problem& problem, const cuda::Traffic& traffic,
                      const cuda::Settings& settings) {
  cuda::Device device;
  BNAR_CHECK(cuda::QueryDevice(&device) == cudaSuccess, "");
  return cuda::MakePlan(problem, cuda::kWidth, traffic, device, settings)
      .tiling;
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
// a warp, several warps or a block adds a column, and in which blocks add
// columns in one turn or in two. The largest ones take long, and the stacks of
// their threads too much memory under AddressSanitizer.
void TestTeams(cuda::Settings settings) {
#ifdef BNAR_TEST_ADDRESS_SANITIZER
  constexpr int kMostMultiprocessors = 20;
#else
  constexpr int kMostMultiprocessors = 132;
#endif
  settings.teams = 1;
  settings.slab_channels = cuda::kMaxColumns;
  for (const int multiprocessors : {1, 3, 20, 70, 132}) {
    if (multiprocessors > kMostMultiprocessors) break;
    Use(DeviceOf(multiprocessors, 4, 64));
    const int64_t tiles = 2 * multiprocessors;
    const int64_t before = LaunchesOf("Forward on_chip");
    const Case cases[] = {
        {{1, tiles * 256 - 3, 8, 1}, DType::kFloat32, 0, 0, true},
        {{1, tiles * 32 - 3, 64, 1}, DType::kBFloat16, 0, 0, true},
        {{1, tiles * 8 - 3, 256, 1}, DType::kBFloat16, 0, 0, true}};
    for (const Case& c : cases) {
      context = c.Name() + " in a team of " + std::to_string(tiles);
      const cuda::Tiling t =
          TilingOf(c.problem(), cuda::kForwardArrays, settings);
      BNAR_CHECK(t.team == tiles && t.columns == c.shape.channels,
                 std::to_string(t.team) + " blocks");
      if (multiprocessors < 70) {
        TestCase(c, settings, Calls::kWholePasses);
      } else if (c.dtype == DType::kBFloat16) {
        CudaPlatform platform(settings);
        const Inputs in(c);
        CheckStatistics(in,
                        CallForward(platform, in, NormaliseOptionsOf(in.c)[0]));
      }
    }
    BNAR_CHECK(LaunchesOf("Forward on_chip") > before, "two kernels");
    settings.zero_workspace = !settings.zero_workspace;
  }
}

// Slabs with fewer channels than others, so that a tile has more rows, and with
// more than a block adds at a time.
void TestSlabs(cuda::Settings settings) {
  const auto test = [&](const Case& c) {
    TestCase(c, settings, Calls::kWholePasses);
  };
  for (const int channels : {8, 16, 32}) {
    settings.slab_channels = channels;
    test({{1, 301, 72, 1}, DType::kBFloat16, 0, 0, true});
    test({{2, 90, 40, 1}, DType::kFloat32, 0, 0, false});
  }
  for (const int channels : {128, 256}) {
    settings.slab_channels = channels;
    test({{1, 155, 264, 1}, DType::kBFloat16, 0, 0, true});
    test({{2, 45, 200, 1}, DType::kFloat32, 0, 0, false});
  }
}

// Masks in either order, of several groups, written and read by eights and by
// single elements, and by slabs that have a part of the channels whose bits lie
// together.
void TestMasks(cuda::Settings settings) {
  const Calls calls = CallsOf(settings);
  const Shape shape{2, 75, 96, 1};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const int64_t mask_channels = cuda::MaskChannels(shape);
    BNAR_CHECK(mask_channels == 32, "");
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
            cuda::MaskChannels({2, 75, 96, 1})});
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

// In how many plans for vectors teams take several slabs, which fit on chip or
// do not.
struct StreamPlans {
  int fits = 0;
  int exceeds = 0;

  void Count(const cuda::Tiling& t) {
    if (t.shared_tiles == 0 || t.num_slabs == t.num_teams) return;
    ++(t.shared_tiles >= t.tiles_per_block ? fits : exceeds);
  }
  std::string Text() const {
    return std::to_string(fits) + " and " + std::to_string(exceeds) + " plans";
  }
};

// Teams that take several slabs, with as many tiles as a block keeps, with
// fewer, and with more, so that copies go round the ring of slots several times
// in each pass. With `few`, bfloat16 only.
void TestStream(cuda::Settings settings, bool few) {
  settings.slab_channels = 64;
  StreamPlans forward, backward;
  const int64_t before[] = {LaunchesOf("Forward on_chip"),
                            LaunchesOf("Backward on_chip")};
  struct Room {
    int slots;
    int teams;
  };
  for (const Room& room : {Room{8, 1}, Room{16, 1}, Room{16, 2}, Room{32, 1}}) {
    Use(DeviceOf(2, room.slots, 64));
    settings.teams = room.teams;
    // Stages of up to four tiles, the last of which have all numbers of tiles:
    // one block of a team of four has one tile less than the others.
    for (const int tiles : {1, 7, 10, 37}) {
      const int64_t rows = (4 * tiles - 1) * 32 - 5;
      for (const Case& c :
           {Case{{1, rows, 5 * 64, 1}, DType::kBFloat16, 0, 0, true},
            Case{{1, rows, 3 * 64 - 16, 1}, DType::kFloat32, 0, 0, true},
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
        forward.Count(TilingOf(problem, cuda::kForwardArrays, settings));
        backward.Count(TilingOf(problem, cuda::kBackwardArrays, settings));
      }
    }
  }
  if (few) return;
  BNAR_CHECK(forward.fits == 31 && forward.exceeds == 17, forward.Text());
  BNAR_CHECK(backward.fits == 25 && backward.exceeds == 23, backward.Text());
  BNAR_CHECK(LaunchesOf("Forward on_chip") - before[0] >= 4 * 4 * 3 &&
                 LaunchesOf("Backward on_chip") - before[1] >= 4 * 4 * 3,
             "two kernels");
}

// Clusters in which one block has no tile: there are three, of rows or of a
// plane.
void TestEmptyBlocks(const cuda::Settings& settings) {
  Use(DeviceOf(3, 8, 64));
  for (const Case& c :
       {Case{{1, 2 * 256 + 3, 8, 1}, DType::kBFloat16, 0, 0, true},
        Case{{1, 1, 1, 8 * 600}, DType::kFloat32, 0, 0, true}}) {
    context = c.Name();
    const cuda::Tiling t =
        TilingOf(c.problem(), cuda::kForwardArrays, settings);
    BNAR_CHECK(
        t.team == 4 && t.tiles_per_block == 1 && t.longer_blocks == 3,
        std::to_string(t.longer_blocks) + " of " + std::to_string(t.team));
    TestCase(c, settings, Calls::kWholePasses);
  }
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

// A build for 8.0 alone, whose PTX the driver has compiled for a device with
// clusters.
void TestCodeWithoutClusters(const cuda::Settings& settings) {
  cuda_emulation::Device device = DeviceOf(3, 8, 64);
  device.ptx_version = 80;
  Use(device);
  cuda::Device described;
  BNAR_CHECK(
      cuda::DescribeDevice(&described) == cudaSuccess && !described.clusters,
      "clusters without code for them");
  const int64_t before = LaunchesOf("Forward cluster");
  TestCase({{1, 301, 72, 1}, DType::kBFloat16, 0, 0, true}, settings,
           Calls::kWholePasses);
  BNAR_CHECK(LaunchesOf("Forward cluster") == before, "a cluster");
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
    TestSlabs(settings);
    // A cluster of eight blocks, of which some have one tile less.
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
  if (settings.strategy == cuda::Strategy::kCluster) {
    TestEmptyBlocks(settings);
    TestCodeWithoutClusters(settings);
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
