// Kernels in the patterns that ours use give the same results on the emulated
// device as they would on a real one, whatever the seed.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

#include "tests/cuda_emulation/testing.h"

namespace jax_bnar {
namespace testing {
namespace {

constexpr unsigned kSeeds = 5;

template <typename T>
__global__ void BlockSums(const T* x, T* sums, int repeats) {
  auto* partial = reinterpret_cast<T*>(cuda_emulation::DynamicShared());
  for (int i = 0; i < repeats; ++i) {
    const T sum = BlockSum(
        x[blockIdx.x * blockDim.x + threadIdx.x] + static_cast<T>(i), partial);
    if (threadIdx.x == 0) sums[blockIdx.x * repeats + i] = sum;
  }
}

template <typename T>
void TestBlockSums() {
  constexpr unsigned kGrid = 5, kBlock = 256, kRepeats = 3;
  std::vector<T> x(kGrid * kBlock), sums(kGrid * kRepeats);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(i % 41);
  const cudaError_t error =
      Launch({kGrid, kBlock, kBlock / 32 * sizeof(T)}, BlockSums<T>, x.data(),
             sums.data(), kRepeats);
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  for (unsigned b = 0; b < kGrid; ++b) {
    for (unsigned r = 0; r < kRepeats; ++r) {
      T expected = 0;
      for (unsigned i = 0; i < kBlock; ++i) {
        expected += x[b * kBlock + i] + static_cast<T>(r);
      }
      BNAR_CHECK(sums[b * kRepeats + r] == expected, std::to_string(b));
    }
  }
}

// After a barrier of the grid, each block adds up the numbers of all blocks.
__global__ void GridSums(unsigned* arrived, unsigned* numbers, unsigned* sums,
                         int repeats) {
  for (int r = 1; r <= repeats; ++r) {
    if (threadIdx.x == 0) {
      numbers[blockIdx.x] = (blockIdx.x + 1) * static_cast<unsigned>(r);
    }
    for (int phase = 0; phase < 2; ++phase) {
      __syncthreads();
      if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(arrived, 1u);
        const auto target =
            static_cast<unsigned>(2 * r - 1 + phase) * gridDim.x;
        while (cuda_emulation::LoadAcquire(arrived) < target) __nanosleep(20);
      }
      __syncthreads();
      if (phase == 1) break;
      unsigned sum = 0;
      for (unsigned i = 0; i < gridDim.x; ++i) sum += numbers[i];
      if (threadIdx.x == blockDim.x - 1) {
        sums[static_cast<unsigned>(r - 1) * gridDim.x + blockIdx.x] = sum;
      }
    }
  }
}

void TestGridBarrier() {
  constexpr unsigned kGrid = 12, kRepeats = 4;
  unsigned arrived = 0;
  std::vector<unsigned> numbers(kGrid), sums(kGrid * kRepeats);
  const cudaError_t error = Launch({kGrid, 64, 0, true}, GridSums, &arrived,
                                   numbers.data(), sums.data(), kRepeats);
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  for (unsigned i = 0; i < sums.size(); ++i) {
    BNAR_CHECK(sums[i] == (i / kGrid + 1) * kGrid * (kGrid + 1) / 2,
               std::to_string(i));
  }
}

struct alignas(16) Note {
  unsigned long long number, tag;
};

// Each block sends a number to the next one in a ring, and takes what comes out
// of its box, so that the next round cannot take it for its own.
__global__ void PassAround(Note* boxes, unsigned long long* sums, int rounds) {
  if (threadIdx.x != 0) return;
  Note* mine = boxes + blockIdx.x;
  Note* next = boxes + (blockIdx.x + 1) % gridDim.x;
  unsigned long long number = blockIdx.x;
  for (int r = 0; r < rounds; ++r) {
    while (cuda_emulation::LoadRelaxed(next).tag != 0) __nanosleep(20);
    cuda_emulation::StoreRelaxed(next, {number, 1});
    Note note;
    while ((note = cuda_emulation::LoadRelaxed(mine)).tag == 0) __nanosleep(20);
    cuda_emulation::StoreRelaxed(mine, {0, 0});
    number = note.number + 1;
  }
  sums[blockIdx.x] = number;
}

void TestRelaxedAccesses() {
  constexpr unsigned kGrid = 6, kRounds = 9;
  std::vector<Note> boxes(kGrid);
  std::vector<unsigned long long> sums(kGrid);
  const cudaError_t error = Launch({kGrid, 32, 0, true}, PassAround,
                                   boxes.data(), sums.data(), kRounds);
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  for (unsigned i = 0; i < kGrid; ++i) {
    BNAR_CHECK(sums[i] == (i + 2 * kGrid - kRounds) % kGrid + kRounds,
               std::to_string(i));
  }
}

// The block that finishes last adds up what all blocks have stored.
__global__ void LastBlockSum(unsigned* finished, float* partial, float* sum) {
  auto* is_last = reinterpret_cast<unsigned*>(cuda_emulation::DynamicShared());
  if (threadIdx.x == 7) partial[blockIdx.x] = static_cast<float>(blockIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *is_last = atomicInc(finished, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (*is_last == 0) return;
  __threadfence();
  float mine = 0;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += blockDim.x) {
    mine += __ldcg(partial + i);
  }
  mine = WarpSum(mine);
  if (threadIdx.x == 0) *sum = mine;
}

void TestLastBlock() {
  constexpr unsigned kGrid = 100;
  unsigned finished = 0;
  float sum = 0;
  std::vector<float> partial(kGrid);
  const cudaError_t error = Launch({kGrid, 32, sizeof(unsigned)}, LastBlockSum,
                                   &finished, partial.data(), &sum);
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  BNAR_CHECK(sum == kGrid * (kGrid - 1) / 2, std::to_string(sum));
  BNAR_CHECK(finished == 0, "atomicInc wraps around");
}

// The second block polls using nothing but barriers, and the first block must
// still go on.
__global__ void PollWithBarriers(volatile unsigned* flag) {
  if (blockIdx.x == 0) {
    for (int i = 0; i < 10; ++i) __syncthreads();
    if (threadIdx.x == 0) *flag = 1;
  } else {
    while (__syncthreads_or(threadIdx.x == 0 && *flag != 0) == 0) {
    }
  }
}

void TestPolling() {
  unsigned flag = 0;
  const cudaError_t error = Launch({2, 64, 0, true}, PollWithBarriers, &flag);
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
}

struct WarpResults {
  int indexed, up, down, exchanged, ballot, any, all, all_but, wide_up;
  int or_vote, and_vote, count;
  unsigned active;
};

__global__ void WarpOperations(WarpResults* results) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  WarpResults r;
  r.indexed = __shfl_sync(kAll, lane, lane + 3, 8);
  r.up = __shfl_up_sync(kAll, lane, 2, 8);
  r.down = __shfl_down_sync(kAll, lane, 3, 16);
  r.exchanged = __shfl_xor_sync(kAll, lane, 17);
  r.ballot = static_cast<int>(__ballot_sync(kAll, lane % 3 == 0));
  r.any = __any_sync(kAll, lane == 31);
  r.all = __all_sync(kAll, lane < 32);
  r.all_but = __all_sync(kAll, lane < 31);
  r.wide_up = static_cast<int>(__shfl_up_sync(kAll, (1ll << 40) + lane, 1) -
                               (1ll << 40));
  // Pairs exchange while other lanes already wait for the whole warp.
  if (lane < 8) {
    const unsigned pair = 3u << (lane & 30);
    r.exchanged += __shfl_xor_sync(pair, lane, 1) - (lane ^ 1);
  }
  r.any = r.any && __any_sync(kAll, lane == 0);
  // The two halves of the warp go separate ways.
  const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;
  if (lane < 16) {
    r.ballot ^= static_cast<int>(__ballot_sync(half, 1));
  } else {
    r.ballot ^= static_cast<int>(__ballot_sync(half, lane == 20));
    __syncwarp(half);
  }
  r.active = __activemask();
  r.or_vote = __syncthreads_or(threadIdx.x == 40);
  r.and_vote = __syncthreads_and(threadIdx.x != 40);
  r.count = __syncthreads_count(threadIdx.x % 2);
  results[threadIdx.x] = r;
}

void TestWarpOperations() {
  std::vector<WarpResults> results(64);
  const cudaError_t error = Launch({1, 64}, WarpOperations, results.data());
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  int thirds = 0;
  for (int i = 0; i < 32; i += 3) {
    thirds |= static_cast<int>(1u << i);
  }
  for (int i = 0; i < 64; ++i) {
    const WarpResults& r = results[static_cast<std::size_t>(i)];
    const int lane = i % 32;
    const std::string name = std::to_string(i);
    BNAR_CHECK(r.indexed == lane / 8 * 8 + (lane + 3) % 8, name);
    BNAR_CHECK(r.up == (lane % 8 < 2 ? lane : lane - 2), name);
    BNAR_CHECK(r.down == (lane % 16 > 12 ? lane : lane + 3), name);
    BNAR_CHECK(r.exchanged == (lane ^ 17), name);
    BNAR_CHECK(r.ballot == (thirds ^ (lane < 16 ? 0xffff : 1 << 20)), name);
    BNAR_CHECK(r.any == 1 && r.all == 1 && r.all_but == 0, name);
    BNAR_CHECK(r.wide_up == (lane == 0 ? 0 : lane - 1), name);
    BNAR_CHECK(r.active == 1u << lane, name);
    BNAR_CHECK(r.or_vote == 1 && r.and_vote == 0 && r.count == 32, name);
  }
}

__global__ void Indices(dim3* seen, const std::uint16_t* shared_is_nan,
                        int* mistakes) {
  const unsigned block =
      (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned thread =
      (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
  dim3* mine = seen + 2 * (block * threads + thread);
  mine[0] = blockIdx;
  mine[1] = threadIdx;
  const auto* shared =
      reinterpret_cast<const std::uint16_t*>(cuda_emulation::DynamicShared());
  if (reinterpret_cast<std::uintptr_t>(shared) % 128 != 0 ||
      shared[thread] != *shared_is_nan) {
    atomicAdd(mistakes, 1);
  }
}

void TestIndices() {
  const dim3 grid(3, 2, 4), block(5, 3, 2);
  const std::uint16_t nan = 0xfffd;
  int mistakes = 0;
  std::vector<dim3> seen(2 * 24 * 30, dim3(99, 99, 99));
  const cudaError_t error =
      Launch({grid, block, 60}, Indices, seen.data(), &nan, &mistakes);
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  BNAR_CHECK(mistakes == 0, std::to_string(mistakes));
  for (unsigned i = 0; i < 24 * 30; ++i) {
    const unsigned b = i / 30, t = i % 30;
    const dim3 seen_block = seen[2 * i], seen_thread = seen[2 * i + 1];
    BNAR_CHECK(seen_block.x == b % 3 && seen_block.y == b / 3 % 2 &&
                   seen_block.z == b / 6,
               std::to_string(b));
    BNAR_CHECK(seen_thread.x == t % 5 && seen_thread.y == t / 5 % 3 &&
                   seen_thread.z == t / 15,
               std::to_string(t));
  }
}

// A lock of one word. As in CUDA, only one thread of a warp may try to take it.
__global__ void CountUnderLock(unsigned* lock, long long* counter) {
  if (threadIdx.x % 32 != 0) return;
  while (atomicCAS(lock, 0u, 1u) != 0) __nanosleep(10);
  const long long old = *counter;
  cuda_emulation::Yield();
  *counter = old + 1;
  __threadfence();
  atomicExch(lock, 0u);
}

void TestLock() {
  unsigned lock = 0;
  long long counter = 0;
  const cudaError_t error =
      Launch({12, 128, 0, true}, CountUnderLock, &lock, &counter);
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  BNAR_CHECK(counter == 48, std::to_string(counter));
}

// Operations of a warp do not wait for lanes that have exited.
__global__ void EarlyExit(unsigned* votes) {
  if (threadIdx.x % 2 == 1) return;
  const unsigned vote = __ballot_sync(kAll, 1);
  votes[threadIdx.x] = vote;
}

void TestEarlyExit() {
  std::vector<unsigned> votes(40);
  const cudaError_t error = Launch({1, 40}, EarlyExit, votes.data());
  BNAR_CHECK(error == cudaSuccess, cuda_emulation::LastMessage());
  BNAR_CHECK(votes[0] == 0x55555555 && votes[38] == 0x55, "");
}

void TestSeveralHostThreads() {
  std::vector<std::thread> threads;
  std::vector<int> passed(4);
  for (std::size_t t = 0; t < passed.size(); ++t) {
    threads.emplace_back([&passed, t] {
      unsigned arrived = 0;
      std::vector<unsigned> numbers(12), sums(12);
      const cudaError_t error = Launch({12, 64, 0, true}, GridSums, &arrived,
                                       numbers.data(), sums.data(), 1);
      passed[t] = error == cudaSuccess && sums[0] == 78 && sums[11] == 78;
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int p : passed) BNAR_CHECK(p == 1, "");
}

// Sums of floats must not depend on the order of atomics.
template <typename T, typename = void>
struct HasAtomicAdd : std::false_type {};
template <typename T>
struct HasAtomicAdd<
    T, std::void_t<decltype(atomicAdd(std::declval<T*>(), std::declval<T>()))>>
    : std::true_type {};
static_assert(HasAtomicAdd<int>::value && HasAtomicAdd<unsigned>::value &&
              HasAtomicAdd<unsigned long long>::value);
static_assert(!HasAtomicAdd<float>::value && !HasAtomicAdd<double>::value);

void TestAll() {
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    SetSeed(seed);
    TestBlockSums<float>();
    TestBlockSums<double>();
    TestBlockSums<int>();
    TestBlockSums<unsigned long long>();
    TestGridBarrier();
    TestRelaxedAccesses();
    TestLastBlock();
    TestPolling();
    TestWarpOperations();
    TestIndices();
    TestLock();
    TestEarlyExit();
    TestSeveralHostThreads();
  }
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  jax_bnar::testing::TestAll();
  return jax_bnar::testing::Finish();
}
