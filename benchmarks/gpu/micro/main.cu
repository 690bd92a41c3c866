// Measures, in a few seconds and without JAX, what the constants of
// cuda/host/cost.h are about, and prints it as JSON. `constants.py` computes
// the constants from it.

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/gpu/micro/kernels.cuh"
#include "benchmarks/gpu/micro/timing.cuh"
#include "cuda/host/parameters.h"
#include "cuda/host/tiling.h"
#include "cuda/host/workspace.h"

namespace jax_bnar {
namespace micro {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
// Several times the L2 of any device.
constexpr int64_t kBytes = 512 * kMiB;
constexpr int kRepeats = 7;
// What the kernels have on each multiprocessor: two blocks, each thread of
// which has 64 bytes in flight.
constexpr int kBlocks = cuda::kBlocksPerMultiprocessor;
constexpr int kDepth = cuda::kBytesAtOnce / static_cast<int>(sizeof(uint4));
// Two such blocks fill the shared memory of a multiprocessor.
constexpr int kSharedBytes = 113 * 1024;

class Micro {
 public:
  Micro() {
    Check(cudaGetDevice(&id_), "device");
    Check(cudaGetDeviceProperties(&properties_, id_), "device");
    Check(cudaMalloc(&from_, kBytes), "memory");
    Check(cudaMalloc(&to_, kBytes), "memory");
    Check(cudaMemset(from_, 1, kBytes), "memory");
    Check(cudaMemset(to_, 0, kBytes), "memory");
    // The stopwatch's stream does not wait for the one in which that happens.
    Check(cudaDeviceSynchronize(), "memory");
    Check(cudaMalloc(&read_,
                     8 * multiprocessors() * sizeof(uint32_t) * cuda::kThreads),
          "memory");
    Check(cudaMalloc(&ends_, 8 * multiprocessors() * sizeof(uint64_t)),
          "memory");
  }

  void Print() {
    std::printf("{\"device\": {\"name\": \"%s\", \"multiprocessors\": %d, ",
                properties_.name, multiprocessors());
    std::printf("\"l2_bytes\": %d, \"bytes_per_us\": %g},\n\"measured\": [",
                properties_.l2CacheSize, NominalRate());
    CopyByDriver();
    CopyPieces();
    ReadWithLessInFlight();
    Spread();
    Kernels();
    ReadAgain();
    Attributes();
    // The last, because blocks wait for each other here.
    Messages();
    std::printf("\n]}\n");
  }

 private:
  int multiprocessors() const { return properties_.multiProcessorCount; }

  double NominalRate() const {
    return 2e-3 * Attribute(cudaDevAttrMemoryClockRate) *
           Attribute(cudaDevAttrGlobalMemoryBusWidth) / 8;
  }

  int Attribute(cudaDeviceAttr attribute) const {
    int value = 0;
    Check(cudaDeviceGetAttribute(&value, attribute, id_), "attribute");
    return value;
  }

  // Prints an object of numbers, of which "us" is the time.
  void Report(const char* what,
              const std::vector<std::pair<const char*, double>>& numbers) {
    std::printf("%s\n{\"what\": \"%s\"", first_ ? "" : ",", what);
    for (const auto& [name, value] : numbers) {
      std::printf(", \"%s\": %.9g", name, value);
    }
    std::printf("}");
    std::fflush(stdout);
    first_ = false;
  }

  template <int kLoads, bool kStore>
  void Go(const Pieces& p, int begin, int end, int blocks,
          bool backwards = false, int64_t offset = 0) {
    GoThroughPieces<kLoads, kStore><<<static_cast<unsigned>(blocks),
                                      cuda::kThreads, 0, stopwatch_.stream()>>>(
        from_ + offset, to_ + offset, p, begin, end, backwards, read_, ends_);
    Check(cudaGetLastError(), "pieces");
  }

  // Fills L2 with something else.
  void Flush() {
    Check(cudaMemsetAsync(to_, 0, kBytes, stopwatch_.stream()), "memset");
  }

  void CopyByDriver() {
    const double us = stopwatch_.Median(kRepeats, [&] {
      Check(cudaMemcpyAsync(to_, from_, kBytes, cudaMemcpyDeviceToDevice,
                            stopwatch_.stream()),
            "copy");
    });
    Report("memcpy", {{"bytes", 2.0 * kBytes}, {"us", us}});
  }

  void CopyPieces() {
    const int blocks = kBlocks * multiprocessors();
    for (const int64_t stride : {128, 512, 2048}) {
      for (const int piece : {64, 128, 256}) {
        if (piece > stride) continue;
        const Pieces p{kBytes / stride, stride, piece};
        for (const bool store : {false, true}) {
          const double us = stopwatch_.Median(kRepeats, [&] {
            store ? Go<kDepth, true>(p, 0, p.slabs(), blocks)
                  : Go<kDepth, false>(p, 0, p.slabs(), blocks);
          });
          Report(store ? "copy" : "read",
                 {{"piece", piece},
                  {"stride", static_cast<double>(stride)},
                  {"bytes", (store ? 2.0 : 1.0) * kBytes},
                  {"us", us}});
        }
      }
    }
  }

  template <int kLoads>
  void ReadWith(int blocks) {
    const Pieces p{kBytes / 128, 128, 128};
    const double us = stopwatch_.Median(kRepeats, [&] {
      Go<kLoads, false>(p, 0, 1, blocks * multiprocessors());
    });
    Report("in_flight", {{"bytes_in_flight", 1.0 * blocks * cuda::kThreads *
                                                 kLoads * sizeof(uint4)},
                         {"bytes", 1.0 * kBytes},
                         {"us", us}});
  }

  // Bytes in flight are those of a multiprocessor.
  void ReadWithLessInFlight() {
    ReadWith<1>(1);
    ReadWith<2>(1);
    ReadWith<4>(1);
    ReadWith<4>(2);
    ReadWith<8>(2);
    ReadWith<8>(4);
  }

  // Blocks with equal shares of a slab that takes about 12 us, a usual first
  // pass: when the last of them is done, against their median.
  void Spread() {
    const int blocks = kBlocks * multiprocessors();
    const Pieces p{48 * kMiB / 64, 512, 64};
    std::vector<uint64_t> ends(static_cast<size_t>(blocks));
    std::vector<double> late;
    double us = 0;
    for (int i = 0; i < 15; ++i) {
      Flush();
      us = stopwatch_.Median(
          1, [] {}, [&] { Go<kDepth, false>(p, i % 8, i % 8 + 1, blocks); });
      Check(cudaMemcpy(ends.data(), ends_, ends.size() * sizeof(uint64_t),
                       cudaMemcpyDeviceToHost),
            "ends");
      std::sort(ends.begin(), ends.end());
      late.push_back(static_cast<double>(ends.back() - ends[ends.size() / 2]));
    }
    std::sort(late.begin(), late.end());
    Report("spread", {{"late_us", 1e-3 * late[late.size() / 2]}, {"us", us}});
  }

  template <typename... Parameters>
  void Launch(void (*kernel)(Parameters...), int blocks, int shared,
              bool cooperative, Parameters... parameters) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks), 1, 1);
    config.blockDim = dim3(cuda::kThreads, 1, 1);
    config.dynamicSmemBytes = static_cast<size_t>(shared);
    config.stream = stopwatch_.stream();
    config.attrs = &attribute;
    config.numAttrs = cooperative ? 1 : 0;
    Check(cudaLaunchKernelEx(&config, kernel, parameters...), "launch");
  }

  // Kernels that do nothing, one after the other in a graph. If `alternating`,
  // every second one has no shared memory, so that the split of shared memory
  // and L1 may change.
  void Kernels() {
    const int most = Attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    const int shared = std::min(kSharedBytes, most / 2 - 1024);
    Check(cudaFuncSetAttribute(
              DoNothing, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
          "shared memory");
    const int blocks = kBlocks * multiprocessors();
    const auto report = [&](bool cooperative, int bytes, bool alternating) {
      int launched = 0;
      const double us = stopwatch_.OfGraph(64, [&] {
        const bool plain = alternating && launched++ % 2 != 0;
        Launch(DoNothing, blocks, plain ? 0 : bytes, cooperative && !plain);
      });
      Report("kernel", {{"cooperative", cooperative ? 1.0 : 0.0},
                        {"shared_bytes", 1.0 * bytes},
                        {"alternating", alternating ? 1.0 : 0.0},
                        {"us", us}});
    };
    for (const bool cooperative : {false, true}) {
      report(cooperative, 0, false);
      report(cooperative, shared, false);
      report(cooperative, shared, true);
    }
  }

  // Rounds of a team of nearly all blocks. The difference between many rounds
  // and one leaves out what a launch takes.
  void Messages() {
    constexpr int kRounds = 17;
    constexpr int kColumns = 64;
    cuda::Tiling tiling = cuda::CutSlabs(
        {1, int64_t{1} << 22, kColumns * kRounds, 1}, cuda::kWidth, kColumns);
    const int team = kBlocks * multiprocessors() - 2;
    tiling.team = team;
    tiling.num_teams = 1;
    const cuda::WorkspaceLayout layout = cuda::LayWorkspace(tiling);
    unsigned char* memory = nullptr;
    cuda::Sums* totals = nullptr;
    Check(cudaMalloc(&memory, static_cast<size_t>(layout.bytes)), "memory");
    Check(cudaMalloc(&totals, sizeof(cuda::Sums) * cuda::kMaxColumns),
          "memory");
    // In the stream of the messages, of which it would erase some otherwise.
    Check(cudaMemsetAsync(memory, 0, static_cast<size_t>(layout.bytes),
                          stopwatch_.stream()),
          "memory");
    cuda::Workspace workspace{};
    workspace.partial_mailboxes =
        reinterpret_cast<cuda::Mailbox*>(memory + layout.partial_mailboxes);
    workspace.total_mailboxes =
        reinterpret_cast<cuda::Mailbox*>(memory + layout.total_mailboxes);
    const int shared = static_cast<int>(cuda::SharedBytes(0, 0));
    const auto time = [&](bool cold, bool prefetch, bool messages, int rounds) {
      const auto launch = [&] {
        ++workspace.tag;
        if (messages) {
          Launch(SendMessages, team, shared, true, tiling, workspace, rounds,
                 prefetch, totals);
        } else {
          Launch(SendNothing, team, shared, true, rounds, prefetch);
        }
      };
      launch();
      return stopwatch_.Median(15, [&] { cold ? Flush() : launch(); }, launch);
    };
    const auto slope = [&](bool cold, bool prefetch, bool messages) {
      return (time(cold, prefetch, messages, kRounds) -
              time(cold, prefetch, messages, 1)) /
             (kRounds - 1);
    };
    const auto report = [&](const char* boxes, bool cold, bool prefetch) {
      Report(boxes, {{"team", 1.0 * team},
                     {"us", slope(cold, prefetch, true) -
                                slope(cold, prefetch, false)}});
    };
    report("messages_warm", false, false);
    report("messages_cold", true, false);
    report("messages_prefetched", true, true);
    Check(cudaFree(memory), "memory");
    Check(cudaFree(totals), "memory");
  }

  // What of a slab L2 still has after as much has been read and written
  // elsewhere: whole lines, and halves of them. Both read the same number of
  // bytes.
  void ReadAgain() {
    const int blocks = kBlocks * multiprocessors();
    for (const int piece : {64, 128}) {
      for (const int64_t mib : {8, 12, 16, 20, 24, 32, 40, 50}) {
        const int64_t rows = mib * kMiB / piece;
        const Pieces p{rows, 128, piece};
        const Pieces elsewhere{mib * kMiB / 128, 128, 128};
        const double cold = stopwatch_.Median(
            kRepeats, [&] { Flush(); },
            [&] { Go<kDepth, false>(p, 0, 1, blocks); });
        const double again = stopwatch_.Median(
            kRepeats,
            [&] {
              Flush();
              Go<kDepth, false>(p, 0, 1, blocks);
              Go<kDepth, true>(elsewhere, 0, 1, blocks, false, kBytes / 2);
            },
            [&] { Go<kDepth, false>(p, 0, 1, blocks, true); });
        Report("again", {{"piece", piece},
                         {"bytes", 1.0 * mib * kMiB},
                         {"cold_us", cold},
                         {"us", again}});
      }
    }
    const double nothing = stopwatch_.Median(
        kRepeats, [&] { Launch(DoNothing, blocks, 0, false); });
    Report("launch", {{"us", nothing}});
  }

  // On the host, for each attribute that the planner asks for.
  void Attributes() {
    const std::pair<const char*, cudaDeviceAttr> attributes[] = {
        {"attribute MultiProcessorCount", cudaDevAttrMultiProcessorCount},
        {"attribute L2CacheSize", cudaDevAttrL2CacheSize},
        {"attribute MemoryClockRate", cudaDevAttrMemoryClockRate},
        {"attribute GlobalMemoryBusWidth", cudaDevAttrGlobalMemoryBusWidth},
        {"attribute CooperativeLaunch", cudaDevAttrCooperativeLaunch},
        {"attribute ClusterLaunch", cudaDevAttrClusterLaunch},
        {"attribute MaxSharedMemoryPerBlockOptin",
         cudaDevAttrMaxSharedMemoryPerBlockOptin},
        {"attribute SingleToDoublePrecisionPerfRatio",
         cudaDevAttrSingleToDoublePrecisionPerfRatio}};
    for (const auto& [name, attribute] : attributes) {
      constexpr int kQueries = 50;
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < kQueries; ++i) Attribute(attribute);
      const std::chrono::duration<double, std::micro> time =
          std::chrono::steady_clock::now() - begin;
      Report(name, {{"us", time.count() / kQueries}});
    }
  }

  int id_ = 0;
  cudaDeviceProp properties_{};
  Stopwatch stopwatch_;
  unsigned char* from_ = nullptr;
  unsigned char* to_ = nullptr;
  uint32_t* read_ = nullptr;
  uint64_t* ends_ = nullptr;
  bool first_ = true;
};

}  // namespace
}  // namespace micro
}  // namespace jax_bnar

int main() {
  jax_bnar::micro::Micro().Print();
  return 0;
}
