// Times the kernels at one site with one plan after the other, without JAX, and
// prints a line of JSON for each. The results of each plan are compared with
// those of two kernels. Then it times the kernels of sums alone, which
// synchronised statistics consist of.
//
//   timed_plans DTYPE BATCH HEIGHT WIDTH CHANNELS RESIDUAL
//   STRATEGY:COLUMNS:TEAMS...
//
// Channels come last, a ReLU follows. With RESIDUAL 1, a residual is added and
// a mask saved; with 0, backward finds the sign in x. COLUMNS are the channels
// of a slab; 0 leaves them, or the number of teams, to the planner.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "benchmarks/gpu/micro/timing.cuh"
#include "cuda/host/known_plans.h"
#include "cuda/host/plan.h"
#include "cuda/host/tiling.h"
#include "cuda/host/workspace.h"
#include "cuda/launch/launch.cuh"
#include "cuda/operations.h"
#include "native/problem.h"

namespace jax_bnar {
namespace timed_plans {
namespace {

using micro::Check;

// What all sets of operands exceed together, several times the L2 of any
// device, and the microseconds of a sample.
constexpr size_t kBytes = size_t{400} << 20;
constexpr double kSample = 6000;
constexpr int kSamples = 5;
// Plans add in another order, so that a few results are rounded otherwise.
constexpr double kLargestDifference = 1.0 / 128;

// Writes numbers that are nearly normal, around 0.3.
template <typename T>
__global__ void Fill(T* to, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    // The finalizer of SplitMix64 (Steele and others, 2014).
    uint64_t bits = (i + 1) * 0x9e3779b97f4a7c15ull + seed;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9ull;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebull;
    bits ^= bits >> 31;
    float sum = -2;
    for (int k = 0; k < 4; ++k) {
      sum += static_cast<float>(bits >> (16 * k) & 0xffff) / 65536;
    }
    to[i] = T(sum * 1.732f + 0.3f);
  }
}

// Adds the squares of the differences, and those of the second array.
template <typename T>
__global__ void Compare(const T* a, const T* b, size_t count, double* sums) {
  double difference = 0, size = 0;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    const double x = static_cast<float>(a[i]), y = static_cast<float>(b[i]);
    difference += (x - y) * (x - y);
    size += y * y;
  }
  atomicAdd(sums, difference);
  atomicAdd(sums + 1, size);
}

struct Site {
  Problem problem;
  bool residual;
};

struct Asked {
  std::string text;
  cuda::Settings settings;
};

template <typename T>
T* Allocate(size_t count) {
  void* memory = nullptr;
  Check(cudaMalloc(&memory, count * sizeof(T)), "memory");
  return static_cast<T*>(memory);
}

// The arrays of one call in each direction.
template <typename T>
struct Operands {
  T *x, *z, *dy, *y, *dx, *dz;
  uint8_t* mask;

  Operands(size_t count, uint64_t seed) {
    for (T** array : {&x, &z, &dy, &y, &dx, &dz}) *array = Allocate<T>(count);
    for (T* array : {x, z, dy}) Fill<<<1024, 256>>>(array, count, ++seed << 32);
    mask = Allocate<uint8_t>(count / 8 + 1);
  }
};

template <typename T>
class Benchmark {
 public:
  explicit Benchmark(const Site& site)
      : problem_(site.problem), residual_(site.residual) {
    Check(PrepareKernelsOnce(), "kernels");
    Check(cuda::DescribeDevice(&device_), "device");
    const size_t bytes = 6 * count() * sizeof(T);
    const size_t sets =
        std::clamp<size_t>(kBytes / bytes + 1, size_t{2}, size_t{24});
    for (size_t i = 0; i < sets; ++i) sets_.emplace_back(count(), 3 * i);
    const auto channels = static_cast<size_t>(problem_.shape.channels);
    std::vector<float> parameters(2 * channels);
    for (size_t i = 0; i < channels; ++i) {
      parameters[i] = 1 + 0.1f * static_cast<float>(i % 7);
      parameters[channels + i] = 0.05f * static_cast<float>(i % 5) - 0.1f;
    }
    scale_ = Allocate<float>(6 * channels);
    Check(cudaMemcpy(scale_, parameters.data(), 2 * channels * sizeof(float),
                     cudaMemcpyHostToDevice),
          "memory");
    bias_ = scale_ + channels;
    mean_ = bias_ + channels;
    var_ = mean_ + channels;
    dscale_ = var_ + channels;
    dbias_ = dscale_ + channels;
    workspace_ = Allocate<uint8_t>(
        static_cast<size_t>(cuda::WorkspaceBytes(problem_.shape)));
    for (T** array : {&expected_y_, &expected_dx_}) {
      *array = Allocate<T>(count());
    }
    sums_ = Allocate<double>(2);
    // The stopwatch's stream does not wait for the one in which that happens.
    Check(cudaDeviceSynchronize(), "operands");
    Settings two_kernels;
    two_kernels.strategy = cuda::Strategy::kTwoKernels;
    const Operands<T>& first = sets_.front();
    Forward(first, two_kernels);
    Backward(first, two_kernels);
    Check(cudaStreamSynchronize(stopwatch_.stream()), "two kernels");
    Check(cudaMemcpy(expected_y_, first.y, count() * sizeof(T),
                     cudaMemcpyDeviceToDevice),
          "memory");
    Check(cudaMemcpy(expected_dx_, first.dx, count() * sizeof(T),
                     cudaMemcpyDeviceToDevice),
          "memory");
  }

  void Print(const Asked& asked) {
    // What another plan has left would pass for the results of one that writes
    // nothing. All bits set is NaN.
    const Operands<T>& first = sets_.front();
    Check(cudaMemset(first.y, 0xff, count() * sizeof(T)), "memory");
    Check(cudaMemset(first.dx, 0xff, count() * sizeof(T)), "memory");
    Check(cudaDeviceSynchronize(), "memory");
    const auto print = [&](const char* direction, const cuda::Traffic& traffic,
                           auto run) {
      PrintPlan(direction, asked.text.c_str(),
                cuda::KnownPlan(problem_, cuda::kWidth, traffic, device_,
                                asked.settings),
                run);
    };
    print("forward", cuda::ForwardTraffic(problem_.dtype, residual_, residual_),
          [&](const Operands<T>& set) { Forward(set, asked.settings); });
    CompareWith(asked, first.y, expected_y_);
    print("backward", cuda::BackwardTraffic(problem_.dtype, gate(), residual_),
          [&](const Operands<T>& set) { Backward(set, asked.settings); });
    CompareWith(asked, first.dx, expected_dx_);
  }

  void PrintSums() const {
    PrintPlan("statistics", "sums",
              cuda::PlanStatistics(problem_, cuda::kWidth, device_),
              [&](const Operands<T>& set) {
                cuda::Launch launch = LaunchWith({});
                CheckLaunch(
                    cuda::Statistics(launch, problem_, set.x, mean_, var_),
                    launch);
              });
    PrintPlan("backward_reduce", "sums",
              cuda::PlanReduction(problem_, cuda::kWidth, device_,
                                  /*whole=*/false),
              [&](const Operands<T>& set) { Reduce(set); });
  }

 private:
  using Settings = cuda::Settings;

  static cudaError_t PrepareKernelsOnce() {
    static const cudaError_t error = cuda::PrepareKernels();
    return error;
  }

  size_t count() const { return static_cast<size_t>(problem_.shape.size()); }
  Gate gate() const { return residual_ ? Gate::kMask : Gate::kX; }

  cuda::Launch LaunchWith(const Settings& settings) const {
    return {stopwatch_.stream(), workspace_, settings, {}};
  }

  static void CheckLaunch(cudaError_t error, const cuda::Launch& launch) {
    Check(error, launch.failure.c_str());
  }

  void Forward(const Operands<T>& set, const Settings& settings) const {
    cuda::Launch launch = LaunchWith(settings);
    NormaliseBuffers<1> buffers{};
    buffers.x[0] = set.x;
    buffers.z = residual_ ? set.z : nullptr;
    buffers.y = set.y;
    buffers.mask = residual_ ? set.mask : nullptr;
    buffers.activation = {ActivationKind::kRelu};
    PerInput<AffineOperands, 1> affine{};
    affine[0] = {{scale_, 1}, {bias_, 1}, 1e-5};
    PerInput<void*, 1> mean{}, var{};
    mean[0] = mean_;
    var[0] = var_;
    CheckLaunch(cuda::Forward<1>(launch, problem_, buffers, affine, mean, var),
                launch);
  }

  GradientBuffers<1> GradientsOf(const Operands<T>& set) const {
    GradientBuffers<1> buffers{};
    buffers.dy = set.dy;
    buffers.x[0] = set.x;
    buffers.saved = residual_ ? set.mask : nullptr;
    buffers.gate = gate();
    buffers.activation = {ActivationKind::kRelu};
    return buffers;
  }

  void Backward(const Operands<T>& set, const Settings& settings) const {
    cuda::Launch launch = LaunchWith(settings);
    PerInput<BackwardOperands, 1> operands{};
    operands[0].mean = {mean_, 1};
    operands[0].var = {var_, 1};
    operands[0].scale = {scale_, 1};
    if (!residual_) operands[0].bias = {bias_, 1};
    operands[0].epsilon = 1e-5;
    PerInput<void*, 1> dx{}, dscale{};
    dx[0] = set.dx;
    dscale[0] = dscale_;
    CheckLaunch(
        cuda::Backward<1>(launch, problem_, GradientsOf(set), operands, dx,
                          dscale, dbias_, residual_ ? set.dz : nullptr),
        launch);
  }

  void Reduce(const Operands<T>& set) const {
    cuda::Launch launch = LaunchWith({});
    PerInput<ReduceOperands, 1> operands{};
    operands[0].mean = {mean_, 1};
    operands[0].var = {var_, 1};
    operands[0].affine = {{scale_, 1}, {}, 1e-5};
    if (!residual_) operands[0].affine.bias = {bias_, 1};
    PerInput<void*, 1> sum_e_centred{};
    sum_e_centred[0] = dscale_;
    CheckLaunch(cuda::BackwardReduce<1>(launch, problem_, GradientsOf(set),
                                        operands, dbias_, sum_e_centred,
                                        residual_ ? set.dz : nullptr),
                launch);
  }

  template <typename Run>
  void PrintPlan(const char* direction, const char* asked,
                 const cuda::Plan& plan, Run run) const {
    const auto all = [&] {
      for (const Operands<T>& set : sets_) run(set);
    };
    const auto sets = static_cast<double>(sets_.size());
    const int repeats =
        std::max(1, static_cast<int>(kSample / stopwatch_.Median(1, all)));
    const double time = stopwatch_.Median(kSamples, [&] {
      for (int i = 0; i < repeats; ++i) all();
    });
    std::printf(
        "{\"asked\": \"%s\", \"direction\": \"%s\", \"strategy\": \"%s\", "
        "\"slab_channels\": %d, \"team\": %d, \"teams\": %d, "
        "\"tiles_kept\": %d, \"tiles\": %lld, \"us\": %.1f}\n",
        asked, direction, cuda::NameOf(plan.strategy), plan.tiling.columns,
        plan.tiling.team, plan.tiling.num_teams, plan.tiling.shared_tiles,
        static_cast<long long>(plan.tiling.tiles_per_block),
        time / (repeats * sets));
    std::fflush(stdout);
  }

  void CompareWith(const Asked& asked, const T* result,
                   const T* expected) const {
    double sums[2] = {0, 0};
    Check(cudaMemcpy(sums_, sums, sizeof(sums), cudaMemcpyHostToDevice),
          "memory");
    Compare<<<512, 256>>>(result, expected, count(), sums_);
    Check(cudaMemcpy(sums, sums_, sizeof(sums), cudaMemcpyDeviceToHost),
          "memory");
    // NaN is no small difference.
    if (!(std::sqrt(sums[0] / sums[1]) <= kLargestDifference)) {
      std::fprintf(stderr, "%s: the results are not those of two kernels\n",
                   asked.text.c_str());
      std::exit(1);
    }
  }

  const Problem problem_;
  const bool residual_;
  const micro::Stopwatch stopwatch_;
  cuda::Device device_;
  std::vector<Operands<T>> sets_;
  float *scale_, *bias_, *mean_, *var_, *dscale_, *dbias_;
  uint8_t* workspace_;
  T *expected_y_, *expected_dx_;
  double* sums_;
};

template <typename T>
void TimeAll(const Site& site, const std::vector<Asked>& all) {
  Benchmark<T> benchmark(site);
  for (const Asked& asked : all) benchmark.Print(asked);
  benchmark.PrintSums();
}

[[noreturn]] void Refuse(const char* what) {
  std::fprintf(stderr,
               "%s is wrong: expected DTYPE BATCH HEIGHT WIDTH CHANNELS "
               "RESIDUAL STRATEGY:COLUMNS:TEAMS...\n",
               what);
  std::exit(2);
}

int64_t Number(const char* text) {
  char* end = nullptr;
  const long long number = std::strtoll(text, &end, 10);
  if (*end != 0 || end == text || number < 0) Refuse(text);
  return number;
}

Asked Parse(const std::string& text) {
  Asked asked{text, {}};
  const size_t first = text.find(':');
  const size_t second = text.find(':', first + 1);
  if (first == std::string::npos || second == std::string::npos ||
      !cuda::FindStrategy(text.substr(0, first), &asked.settings.strategy)) {
    Refuse(text.c_str());
  }
  asked.settings.slab_channels = static_cast<int>(
      Number(text.substr(first + 1, second - first - 1).c_str()));
  asked.settings.teams =
      static_cast<int>(Number(text.substr(second + 1).c_str()));
  return asked;
}

int Main(int argc, char** argv) {
  if (argc < 8) Refuse("the number of arguments");
  const std::string dtype = argv[1];
  const int64_t rows = Number(argv[2]) * Number(argv[3]) * Number(argv[4]);
  Site site{};
  site.problem.shape = {1, rows, Number(argv[5]), 1};
  site.residual = Number(argv[6]) != 0;
  site.problem.mask_channels = cuda::MaskChannels(site.problem.shape);
  std::vector<Asked> all;
  for (int i = 7; i < argc; ++i) all.push_back(Parse(argv[i]));
  const auto set_dtype = [&](DType type) {
    site.problem.dtype = site.problem.out_dtype = type;
  };
  if (dtype == "bfloat16") {
    set_dtype(DType::kBFloat16);
    TimeAll<__nv_bfloat16>(site, all);
  } else if (dtype == "float16") {
    set_dtype(DType::kFloat16);
    TimeAll<__half>(site, all);
  } else if (dtype == "float32") {
    set_dtype(DType::kFloat32);
    TimeAll<float>(site, all);
  } else {
    Refuse(dtype.c_str());
  }
  return 0;
}

}  // namespace
}  // namespace timed_plans
}  // namespace jax_bnar

int main(int argc, char** argv) {
  return jax_bnar::timed_plans::Main(argc, argv);
}
