// Copies to shared memory: their groups, and what a thread sees that does not
// wait for them.

#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/cuda_emulation/testing.h"

namespace jax_bnar {
namespace testing {
namespace {

constexpr int kTiles = 7;
constexpr unsigned kThreads = 64;

enum class Mistake {
  kNone,
  kWaitsForOneLess,
  kForgetsToClose,
  kReusesTooEarly,
  kExits
};

// Each thread adds numbers that go through a ring of two slots.
__global__ void AddTiles(const float4* x, float* sums, Mistake mistake) {
  auto* slots = reinterpret_cast<float4*>(cuda_emulation::DynamicShared());
  const auto slot = [&](int tile) {
    return slots + tile % 2 * blockDim.x + threadIdx.x;
  };
  const auto start = [&](int tile) {
    if (tile < kTiles) {
      cuda_emulation::StartCopy(slot(tile), x + tile * blockDim.x + threadIdx.x,
                                sizeof(float4));
    }
    if (mistake != Mistake::kForgetsToClose) cuda_emulation::CloseCopies();
  };
  start(0);
  float sum = 0;
  for (int tile = 0; tile < kTiles; ++tile) {
    start(tile + 1);
    if (mistake == Mistake::kExits && tile + 1 == kTiles) break;
    cuda_emulation::WaitForCopies(mistake == Mistake::kWaitsForOneLess ? 2 : 1);
    if (mistake == Mistake::kReusesTooEarly && tile + 2 < kTiles) {
      start(tile + 2);
    }
    sum += slot(tile)->x + slot(tile)->w;
  }
  sums[threadIdx.x] = sum;
}

std::vector<float> Run(Mistake mistake, cudaError_t* error) {
  std::vector<float4> x(kTiles * kThreads);
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = {static_cast<float>(i), 0, 0, 1};
  }
  std::vector<float> sums(kThreads);
  *error = Launch({1, kThreads, 2 * kThreads * sizeof(float4)}, AddTiles,
                  x.data(), sums.data(), mistake);
  return sums;
}

void TestGroups() {
  cudaError_t error;
  const std::vector<float> sums = Run(Mistake::kNone, &error);
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  for (unsigned i = 0; i < kThreads; ++i) {
    const auto expected = static_cast<float>(
        kTiles * (kTiles - 1) / 2 * kThreads + kTiles * i + kTiles);
    BNAR_CHECK(sums[i] == expected, std::to_string(sums[i]));
  }
}

void TestMistakes() {
  cudaError_t error;
  for (const Mistake mistake :
       {Mistake::kWaitsForOneLess, Mistake::kForgetsToClose,
        Mistake::kReusesTooEarly, Mistake::kExits}) {
    const std::vector<float> sums = Run(mistake, &error);
    BNAR_CHECK(error != cudaSuccess || std::isnan(sums[0]),
               std::to_string(static_cast<int>(mistake)));
  }
  Run(Mistake::kExits, &error);
  BNAR_CHECK(error == cudaErrorLaunchFailure &&
                 std::strstr(cuda_emulation::LastMessage(),
                             "has not waited for 1 of its copies") != nullptr,
             cuda_emulation::LastMessage());
}

__global__ void CopiesTo(const float4* x, int offset, std::size_t size) {
  cuda_emulation::StartCopy(cuda_emulation::DynamicShared() + offset, x, size);
  cuda_emulation::CloseCopies();
  cuda_emulation::WaitForCopies(0);
}

__global__ void CopiesTwice(const float4* x) {
  cuda_emulation::StartCopy(cuda_emulation::DynamicShared(), x, 16);
  cuda_emulation::StartCopy(cuda_emulation::DynamicShared() + 8, x, 8);
}

__global__ void ChangesWhatItCopies(float4* x, bool waits) {
  cuda_emulation::StartCopy(cuda_emulation::DynamicShared(), x, 16);
  cuda_emulation::CloseCopies();
  if (waits) cuda_emulation::WaitForCopies(0);
  x->y += 1;
  cuda_emulation::WaitForCopies(0);
}

void TestMisuse() {
  float4 x{};
  const auto fails = [](cudaError_t error, const char* part) {
    BNAR_CHECK(error == cudaErrorLaunchFailure &&
                   std::strstr(cuda_emulation::LastMessage(), part) != nullptr,
               cuda_emulation::LastMessage());
  };
  BNAR_CHECK(Launch({1, 1, 32}, CopiesTo, &x, 16, 16) == cudaSuccess,
             cuda_emulation::LastMessage());
  fails(Launch({1, 1, 32}, CopiesTo, &x, 8, 16), "a copy of 16 bytes");
  fails(Launch({1, 1, 32}, CopiesTo, &x, 0, 2), "a copy of 2 bytes");
  fails(Launch({1, 1, 32}, CopiesTo, &x, 32, 16), "outside");
  fails(Launch({1, 1, 32}, CopiesTo, &x, -16, 16), "outside");
  fails(Launch({1, 1, 32}, CopiesTwice, &x), "two copies");
  BNAR_CHECK(Launch({1, 1, 32}, ChangesWhatItCopies, &x, true) == cudaSuccess,
             cuda_emulation::LastMessage());
  fails(Launch({1, 1, 32}, ChangesWhatItCopies, &x, false),
        "has changed while a copy of it was under way");
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  for (unsigned seed = 0; seed < 2; ++seed) {
    jax_bnar::testing::SetSeed(seed);
    jax_bnar::testing::TestGroups();
    jax_bnar::testing::TestMistakes();
    jax_bnar::testing::TestMisuse();
  }
  return jax_bnar::testing::Finish();
}
