// A small emulation of a CUDA device on the host, for tests: a launch runs
// each thread of the grid as a fiber of the calling host thread and returns
// when all have ended. What a GPU leaves undefined is varied on purpose (the
// order of warps, lanes and blocks, from a seed) or reported (barriers that
// not all threads reach, deadlocks). Threads change at barriers, operations of
// warps, atomics and what yields below; a loop that polls with plain loads
// never ends.
//
// This header has what CUDA sources can only say in PTX, and what tests need
// to configure the device and to ask why a launch failed.

#ifndef CUDA_EMULATION_H_
#define CUDA_EMULATION_H_

#include <cstddef>
#include <cstdint>

#include "cuda_emulation/qualifiers.h"
#include "cuda_emulation/vector_types.h"

namespace cuda_emulation {

// The emulated device. Limits are per SM unless said otherwise; the defaults
// are sm_90's except for the few SMs, which keep cooperative grids small.
struct Device {
  bool present = true;
  int sm_count = 3;
  int max_blocks_per_sm = 4;
  int max_threads_per_sm = 2048;
  int registers_per_sm = 65536;
  // Each kernel counts as using this many: the host compiler cannot know.
  int registers_per_thread = 32;
  int shared_memory_per_sm = 228 * 1024;
  int shared_memory_per_block = 48 * 1024;
  int shared_memory_per_block_optin = 227 * 1024;
  int reserved_shared_memory_per_block = 1024;
  int l2_cache_size = 50 * 1024 * 1024;
  int compute_capability_major = 9;
  int compute_capability_minor = 0;
  bool cooperative_launch = true;
  bool cluster_launch = true;
  int max_portable_cluster_size = 8;
  int max_cluster_size = 16;
  // Blocks of an SM that the occupancy queries promise and a cooperative launch
  // does not get: others share the device, or a tool took registers.
  int blocks_per_sm_not_had = 0;
};

// How threads are scheduled.
struct Schedule {
  // Everything that is varied follows from the seed and the launch's shape.
  // The default is the environment variable JAX_BNAR_EMULATION_SEED, or 1.
  // Seeds 2n and 2n + 1 let blocks, warps and lanes run in opposite orders:
  // with one of them a missing barrier shows even in a launch of one block.
  std::uint64_t seed = 1;
  // At most so many blocks (or clusters) of a launch that is not cooperative
  // run at a time, and always fewer than there are: a kernel must not count on
  // more.
  int plain_residency = 2;
  // A launch in which, so many times in succession, every block had its turn
  // and none did more than poll is taken for deadlocked.
  int fruitless_rounds = 10000;
};

// Shared by all host threads; a launch copies them when it starts.
Device GetDevice();
void SetDevice(const Device& device);
Schedule GetSchedule();
void SetSchedule(const Schedule& schedule);

// Why this host thread's last failed call failed, in words; empty after a
// launch that succeeded.
const char* LastMessage();

// For kernels: the block's dynamic shared memory. 128-byte aligned and, under
// AddressSanitizer, no byte more than the launch asked for.
unsigned char* DynamicShared();
std::size_t DynamicSharedSize();

unsigned ClusterRank();
unsigned ClusterSize();
// All threads of the cluster that have not exited: barrier.cluster.
void ClusterArrive();
void ClusterWait();
inline void ClusterBarrier() {
  ClusterArrive();
  ClusterWait();
}
// Where the same byte of dynamic shared memory is in the cluster's block
// `rank`: mapa, cluster.map_shared_rank. Any pointer up to the end is allowed.
void* MapShared(const void* pointer, unsigned rank);
template <typename T>
T* MapShared(T* pointer, unsigned rank) {
  return static_cast<T*>(MapShared(static_cast<const void*>(pointer), rank));
}

// Lets all other threads run, once each, before it returns.
void Yield();
// ld.acquire.gpu; yields first.
unsigned LoadAcquire(const unsigned* pointer);
// st.release.gpu.
void StoreRelease(unsigned* pointer, unsigned value);

// Ends the launch with cudaErrorLaunchFailure and this message.
[[noreturn]] void Fail(const char* format, ...)
    __attribute__((format(printf, 1, 2)));

}  // namespace cuda_emulation

// Of the running thread. __thread rather than thread_local: no call to a
// wrapper on each access.
extern __thread uint3 threadIdx;
extern __thread uint3 blockIdx;
extern __thread dim3 blockDim;
extern __thread dim3 gridDim;

static constexpr int warpSize = 32;

#endif  // CUDA_EMULATION_H_
