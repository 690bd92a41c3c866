// A mistake in a kernel or a launch shows, whatever the seed, either as a wrong
// result or as an error that says what happened.

#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/cuda_emulation/testing.h"

namespace jax_bnar {
namespace testing {
namespace {

constexpr unsigned kSeeds = 8;

void ExpectError(cudaError_t error, cudaError_t expected, const char* part) {
  BNAR_CHECK(error == expected, cudaGetErrorName(error));
  BNAR_CHECK(std::strstr(cuda_emulation::LastMessage(), part) != nullptr,
             cuda_emulation::LastMessage());
  BNAR_CHECK(cudaGetLastError() == expected, "cudaGetLastError");
  BNAR_CHECK(cudaPeekAtLastError() == cudaSuccess, "it was taken");
}

void ExpectFailure(cudaError_t error, const char* part) {
  ExpectError(error, cudaErrorLaunchFailure, part);
}

// The barriers that a block's sum needs. A test leaves out one of them.
enum class Missing { kNone, kWriteBeforeRead, kReadBeforeWrite };

// In each round, each warp leaves a number, and the first warp adds them up.
__global__ void Sums(int* sums, int rounds, Missing missing) {
  auto* partial = reinterpret_cast<int*>(cuda_emulation::DynamicShared());
  for (int round = 0; round < rounds; ++round) {
    if (threadIdx.x % 32 == 0) {
      partial[threadIdx.x / 32] = static_cast<int>(threadIdx.x) + round;
    }
    if (missing != Missing::kWriteBeforeRead) __syncthreads();
    if (threadIdx.x == 0) {
      int sum = 0;
      for (unsigned i = 0; i < blockDim.x / 32; ++i) sum += partial[i];
      sums[static_cast<int>(blockIdx.x) * rounds + round] = sum;
    }
    if (missing != Missing::kReadBeforeWrite) __syncthreads();
  }
}

int WrongSums(Missing missing, unsigned grid = 2) {
  constexpr int kRounds = 2, kWarps = 8;
  std::vector<int> sums(grid * kRounds);
  const cudaError_t error = Launch({grid, kWarps * 32, kWarps * sizeof(int)},
                                   Sums, sums.data(), kRounds, missing);
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  int wrong = 0;
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const int round = static_cast<int>(i % kRounds);
    wrong += sums[i] != 32 * kWarps * (kWarps - 1) / 2 + kWarps * round;
  }
  return wrong;
}

void TestMissingBarrier() {
  BNAR_CHECK(WrongSums(Missing::kNone) == 0, "");
  BNAR_CHECK(WrongSums(Missing::kWriteBeforeRead) > 0, "reads too early");
  BNAR_CHECK(WrongSums(Missing::kReadBeforeWrite) > 0, "writes too early");
}

// In a launch of one block, one of the two seeds of a pair reveals the mistake.
void TestMissingBarrierOfOneBlock() {
  for (const Missing missing :
       {Missing::kWriteBeforeRead, Missing::kReadBeforeWrite}) {
    for (unsigned seed = 0; seed < kSeeds; seed += 2) {
      SetSeed(seed);
      int wrong = WrongSums(missing, 1);
      SetSeed(seed + 1);
      wrong += WrongSums(missing, 1);
      BNAR_CHECK(wrong > 0, std::to_string(static_cast<int>(missing)));
    }
  }
}

// Neighbouring lanes exchange numbers through shared memory.
__global__ void Exchange(int* mistakes, bool barrier) {
  auto* shared = reinterpret_cast<int*>(cuda_emulation::DynamicShared());
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (barrier) __syncwarp();
  const unsigned other = threadIdx.x ^ 1;
  if (shared[other] != static_cast<int>(other)) atomicAdd(mistakes, 1);
}

void TestMissingWarpBarrier() {
  int mistakes = 0;
  Launch({1, 32, 128}, Exchange, &mistakes, true);
  BNAR_CHECK(mistakes == 0, std::to_string(mistakes));
  Launch({1, 32, 128}, Exchange, &mistakes, false);
  BNAR_CHECK(mistakes > 0, "");
}

__global__ void DivergentExit() {
  if (threadIdx.x >= 32) return;
  __syncthreads();
}

__global__ void DivergentKinds() {
  if (threadIdx.x < 40) {
    __syncthreads();
  } else {
    __syncthreads_or(1);
  }
}

// The second half waits for the first half's flag before the barrier at which
// the first half already waits.
__global__ void Crossed(unsigned* flag) {
  if (threadIdx.x >= 32) {
    while (cuda_emulation::LoadAcquire(flag) == 0) __nanosleep(1);
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicExch(flag, 1u);
}

// All threads poll together, because barriers by themselves are no progress.
__global__ void BlockPolls(const unsigned* flag) {
  unsigned seen;
  do {
    seen = threadIdx.x == 0 ? cuda_emulation::LoadAcquire(flag) : 0;
    seen = __shfl_sync(kAll, seen, 0);
  } while (__syncthreads_or(seen != 0) == 0);
}

// Waits for something that nobody stores.
__global__ void WaitsInVain(const unsigned long long* flag) {
  while (cuda_emulation::LoadRelaxed(flag) == 0) __nanosleep(20);
}

__global__ void WarpAgainstBlock() {
  if (threadIdx.x < 16) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

__global__ void WarpKinds() {
  if (threadIdx.x < 16) {
    __ballot_sync(kAll, 1);
  } else {
    __shfl_sync(kAll, 1, 0);
  }
}

__global__ void WarpMasks() {
  if (threadIdx.x < 16) {
    __ballot_sync(kAll, 1);
  } else {
    __ballot_sync(0xffff0000u, 1);
    __ballot_sync(0xffffff00u, 1);
  }
}

__global__ void NotNamed() { __shfl_sync(0xffffu, 1, 0); }

__global__ void OutsideOfMask(float* result) {
  float x = 1;
  if (threadIdx.x < 16) x = __shfl_down_sync(0xffffu, x, 8);
  result[threadIdx.x] = x;
}

void TestDivergence() {
  unsigned flag = 0;
  ExpectFailure(Launch({1, 64}, DivergentExit), "divergent __syncthreads");
  ExpectFailure(Launch({3, 64}, DivergentKinds), "divergent __syncthreads");
  ExpectFailure(Launch({1, 64}, Crossed, &flag), "poll for what does not");
  ExpectFailure(Launch({2, 64}, BlockPolls, &flag), "poll for what does not");
  const unsigned long long never = 0;
  ExpectFailure(Launch({2, 64}, WaitsInVain, &never), "poll for what does not");
  ExpectFailure(Launch({1, 32}, WarpAgainstBlock), "no thread can go on");
  ExpectFailure(Launch({1, 32}, WarpKinds), "different operations");
  ExpectFailure(Launch({1, 32}, WarpMasks), "different operations");
  ExpectFailure(Launch({1, 32}, NotNamed), "does not name it");
  float result[32];
  BNAR_CHECK(Launch({1, 32}, OutsideOfMask, result) == cudaSuccess, "");
  BNAR_CHECK(result[7] == 1 && std::isnan(result[8]), "undefined");
}

// All blocks meet once.
__global__ void GridBarrier(unsigned* arrived) {
  if (threadIdx.x == 0) {
    atomicAdd(arrived, 1u);
    while (cuda_emulation::LoadAcquire(arrived) < gridDim.x) __nanosleep(20);
  }
  __syncthreads();
}

void TestCooperation() {
  unsigned arrived = 0;
  BNAR_CHECK(Launch({12, 64, 0, true}, GridBarrier, &arrived) == cudaSuccess,
             cuda_emulation::LastMessage());
  ExpectError(Launch({13, 64, 0, true}, GridBarrier, &arrived),
              cudaErrorCooperativeLaunchTooLarge, "room for 12");
  cuda_emulation::Device shared;
  shared.blocks_per_sm_not_had = 3;
  cuda_emulation::SetDevice(shared);
  ExpectError(Launch({4, 64, 0, true}, GridBarrier, &arrived),
              cudaErrorCooperativeLaunchTooLarge, "room for 3");
  cuda_emulation::SetDevice({});
  for (const unsigned grid : {2u, 3u, 12u}) {
    arrived = 0;
    ExpectFailure(Launch({grid, 64}, GridBarrier, &arrived),
                  "have not started");
  }
}

__global__ void ExitsBeforePeersRead(float* seen) {
  auto* shared = reinterpret_cast<float*>(cuda_emulation::DynamicShared());
  *shared = 1;
  const unsigned rank = cuda_emulation::ClusterRank();
  const float* other = cuda_emulation::MapShared(shared, rank ^ 1);
  cuda_emulation::ClusterBarrier();
  // The second block is late, and the first one does not wait for it.
  for (int i = 0; rank == 1 && i < 20; ++i) cuda_emulation::Yield();
  if (rank == 1) *seen = *other;
}

__global__ void WaitsWithoutArriving() { cuda_emulation::ClusterWait(); }
__global__ void ArrivesTwice() {
  cuda_emulation::ClusterArrive();
  cuda_emulation::ClusterArrive();
}
__global__ void MapsBeyond() {
  cuda_emulation::MapShared(cuda_emulation::DynamicShared(),
                            cuda_emulation::ClusterSize());
}
__global__ void Empty() {}
__global__ void Misaligned(const float* x) {
  __ldg(reinterpret_cast<const float4*>(x + 1));
}
// As a whole, 8 bytes are accessed only at multiples of 8.
__global__ void MisalignedStore(float* x) {
  cuda_emulation::StoreRelaxed(reinterpret_cast<unsigned long long*>(x + 1),
                               1ull);
}
// Touches the byte at `distance` from the end of the block's shared memory.
__global__ void Overrun(int distance) {
  cuda_emulation::DynamicShared()[static_cast<int>(
                                      cuda_emulation::DynamicSharedSize()) +
                                  distance] = 1;
}

// Returns whether running this ends the process with AddressSanitizer's report.
template <typename Function>
bool Dies(Function function) {
  const pid_t child = fork();
  if (child == 0) {
    // The report is expected, so the log need not contain it.
    if (std::freopen("/dev/null", "w", stderr) == nullptr) _exit(2);
    function();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void TestMemory() {
  alignas(16) float x[8] = {};
  ExpectFailure(Launch({1, 1}, Misaligned, x), "misaligned");
  ExpectFailure(Launch({1, 1}, MisalignedStore, x), "a relaxed access of 8");
  BNAR_CHECK(Launch({2, 4, 100}, Overrun, -1) == cudaSuccess, "");
  float seen = 0;
#ifdef __SANITIZE_ADDRESS__
  for (const int distance : {0, -101, 900}) {
    BNAR_CHECK(Dies([=] { Launch({2, 4, 100}, Overrun, distance); }),
               std::to_string(distance));
  }
  BNAR_CHECK(
      Dies([&] { Launch({2, 1, 4, false, 2}, ExitsBeforePeersRead, &seen); }),
      "");
#else
  for (const int distance : {0, -101, 900}) {
    ExpectFailure(Launch({2, 4, 100}, Overrun, distance), "wrote outside");
  }
  BNAR_CHECK(
      Launch({2, 1, 4, false, 2}, ExitsBeforePeersRead, &seen) == cudaSuccess,
      cuda_emulation::LastMessage());
  BNAR_CHECK(std::isnan(seen), std::to_string(seen));
#endif
}

void TestClusterMisuse() {
  ExpectFailure(Launch({2, 1, 0, false, 2}, WaitsWithoutArriving),
                "without having arrived");
  ExpectFailure(Launch({2, 1, 0, false, 2}, ArrivesTwice), "twice");
  ExpectFailure(Launch({2, 1, 0, false, 2}, MapsBeyond), "rank 2 of");
}

__global__ void Traps() {
  if (blockIdx.x == 2) __trap();
}

void TestConfigurations() {
  ExpectError(Launch({1, 1025}, Empty), cudaErrorInvalidConfiguration, "1025");
  ExpectError(Launch({0, 32}, Empty), cudaErrorInvalidConfiguration, "(0, 1");
  ExpectError(Launch({1, dim3(1, 1, 65)}, Empty), cudaErrorInvalidConfiguration,
              "65");
  ExpectError(Launch({9, 32, 0, false, 9}, Empty), cudaErrorInvalidClusterSize,
              "limit is 8");
  ExpectError(Launch({9, 32, 0, false, 2}, Empty),
              cudaErrorInvalidConfiguration, "cannot be divided");
  ExpectError(Launch({1, 32, 48 * 1024 + 1}, Empty), cudaErrorInvalidValue,
              "49152");
  ExpectFailure(Launch({5, 32}, Traps), "__trap");

  constexpr auto kMost = cudaFuncAttributeMaxDynamicSharedMemorySize;
  ExpectError(cudaFuncSetAttribute(Empty, kMost, 1 << 20),
              cudaErrorInvalidValue, "232448");
  BNAR_CHECK(cudaFuncSetAttribute(Empty, kMost, 100 * 1024) == cudaSuccess, "");
  BNAR_CHECK(Launch({1, 32, 100 * 1024}, Empty) == cudaSuccess, "");
  ExpectError(Launch({1, 32, 100 * 1024 + 1}, Empty), cudaErrorInvalidValue,
              "102400");
  int blocks = 0;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, Empty, 256,
                                                100 * 1024);
  BNAR_CHECK(blocks == 2, std::to_string(blocks));
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, Empty, 1024, 0);
  BNAR_CHECK(blocks == 2, std::to_string(blocks));
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, Empty, 33, 0);
  BNAR_CHECK(blocks == 4, std::to_string(blocks));
  ExpectError(Launch({7, 256, 100 * 1024, true}, Empty),
              cudaErrorCooperativeLaunchTooLarge, "room for 6");
}

void TestDevices() {
  const cuda_emulation::Device usual = cuda_emulation::GetDevice();
  cuda_emulation::Device device = usual;
  device.sm_count = 1;
  device.cooperative_launch = device.cluster_launch = false;
  device.registers_per_thread = 128;
  cuda_emulation::SetDevice(device);
  int value = -1;
  cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0);
  BNAR_CHECK(value == 1, std::to_string(value));
  ExpectError(Launch({1, 32, 0, true}, Empty), cudaErrorNotSupported,
              "cooperative");
  ExpectError(Launch({2, 32, 0, false, 2}, Empty), cudaErrorNotSupported,
              "clusters");
  ExpectError(Launch({1, 1024}, Empty), cudaErrorLaunchOutOfResources,
              "room for 0");
  device.present = false;
  cuda_emulation::SetDevice(device);
  ExpectError(cudaGetDeviceCount(&value), cudaErrorNoDevice, "");
  ExpectError(Launch({1, 32}, Empty), cudaErrorNoDevice, "no device");
  cuda_emulation::SetDevice(usual);
  BNAR_CHECK(Launch({1, 32}, Empty) == cudaSuccess, "");
  BNAR_CHECK(cuda_emulation::LastMessage()[0] == '\0', "");
}

void TestAll() {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    SetSeed(seed);
    TestMissingBarrier();
    TestMissingWarpBarrier();
    TestDivergence();
    TestCooperation();
    TestClusterMisuse();
  }
  TestMissingBarrierOfOneBlock();
  TestMemory();
  TestConfigurations();
  TestDevices();
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  jax_bnar::testing::TestAll();
  return jax_bnar::testing::Finish();
}
