// Tests of clusters of blocks: their barrier, and access to each other's shared
// memory.

#include <cuda_runtime.h>

#include <vector>

#include "tests/cuda_emulation/testing.h"

namespace jax_bnar {
namespace testing {
namespace {

constexpr unsigned kSeeds = 5;

__global__ void ClusterSums(const int* x, int* sums) {
  auto* shared = reinterpret_cast<int*>(cuda_emulation::DynamicShared());
  const int sum =
      BlockSum(x[blockIdx.x * blockDim.x + threadIdx.x], shared + 1);
  if (threadIdx.x == 0) shared[0] = sum;
  cuda_emulation::ClusterBarrier();
  if (threadIdx.x == 0) {
    int total = 0;
    for (unsigned i = 0; i < cuda_emulation::ClusterSize(); ++i) {
      total += *cuda_emulation::MapShared(shared, i);
    }
    sums[blockIdx.x] =
        total * 10 + static_cast<int>(cuda_emulation::ClusterRank());
  }
  // No block's shared memory may go away before all have read it.
  cuda_emulation::ClusterArrive();
  cuda_emulation::ClusterWait();
}

void TestClusters(unsigned grid, bool cooperative) {
  constexpr unsigned kBlock = 64, kCluster = 4;
  std::vector<int> x(grid * kBlock), sums(grid);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<int>(i % 31);
  const cudaError_t error = Launch(
      {grid, kBlock, (1 + kBlock / 32) * sizeof(int), cooperative, kCluster},
      ClusterSums, x.data(), sums.data());
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  for (unsigned b = 0; b < grid; ++b) {
    int expected = 0;
    for (unsigned i = 0; i < kCluster * kBlock; ++i) {
      expected += x[b / kCluster * kCluster * kBlock + i];
    }
    BNAR_CHECK(sums[b] == expected * 10 + static_cast<int>(b % kCluster),
               std::to_string(b));
  }
}

// The cluster's barrier does not wait for threads that have exited.
__global__ void HalfOfCluster(unsigned* sums) {
  auto* shared = reinterpret_cast<unsigned*>(cuda_emulation::DynamicShared());
  shared[threadIdx.x] = blockIdx.x;
  if (threadIdx.x >= 32) return;
  cuda_emulation::ClusterBarrier();
  const unsigned other = cuda_emulation::ClusterRank() ^ 1;
  const unsigned sum =
      blockIdx.x + cuda_emulation::MapShared(shared, other)[threadIdx.x];
  cuda_emulation::ClusterBarrier();
  sums[blockIdx.x * 32 + threadIdx.x] = sum;
}

void TestExited() {
  std::vector<unsigned> sums(128);
  const cudaError_t error =
      Launch({4, 64, 256, false, 2}, HalfOfCluster, sums.data());
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  for (unsigned i = 0; i < sums.size(); ++i) {
    BNAR_CHECK(sums[i] == (i < 64 ? 1u : 5u), std::to_string(i));
  }
}

// Barriers alone, however many, do not count as a deadlock.
__global__ void ManyBarriers(int* rounds) {
  for (int i = 0; i < 500; ++i) {
    cuda_emulation::ClusterBarrier();
    if (threadIdx.x == 0 && cuda_emulation::ClusterRank() == 0) ++*rounds;
  }
}

void TestManyBarriers() {
  const cuda_emulation::Schedule usual = cuda_emulation::GetSchedule();
  cuda_emulation::Schedule schedule = usual;
  schedule.fruitless_rounds = 100;
  cuda_emulation::SetSchedule(schedule);
  int rounds = 0;
  const cudaError_t error = Launch({2, 32, 0, false, 2}, ManyBarriers, &rounds);
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  BNAR_CHECK(rounds == 500, std::to_string(rounds));
  cuda_emulation::SetSchedule(usual);
}

void TestAll() {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    SetSeed(seed);
    TestClusters(24, false);
    TestClusters(12, true);
    TestExited();
    TestManyBarriers();
  }
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  jax_bnar::testing::TestAll();
  return jax_bnar::testing::Finish();
}
