// A small emulation of a CUDA device on the host, for tests. A launch runs each
// thread of the grid as a fiber of the calling host thread, and returns when
// all of them have ended. What a GPU leaves undefined is either varied
// deliberately (the order of warps, lanes and blocks, from a seed) or reported
// (barriers that not all threads reach, deadlocks). Execution passes from one
// thread to another at barriers, at warp operations, at atomics and in the
// functions below that yield. A loop that polls with plain loads therefore
// never ends.
//
// This header declares what CUDA sources can say only in PTX, and what tests
// need in order to configure the device and to learn why a launch failed.

#ifndef CUDA_EMULATION_H_
#define CUDA_EMULATION_H_

#include <cstddef>
#include <cstdint>

#include "cuda_emulation/qualifiers.h"
#include "cuda_emulation/vector_types.h"

namespace cuda_emulation {

// The emulated device. Limits are per SM unless a comment says otherwise. The
// defaults are those of sm_90, except that there are few SMs, which keeps
// cooperative grids small.
struct Device {
  bool present = true;
  int sm_count = 3;
  int max_blocks_per_sm = 4;
  int max_threads_per_sm = 2048;
  int registers_per_sm = 65536;
  // Every kernel counts as using this many registers, because the host compiler
  // cannot know.
  int registers_per_thread = 32;
  int shared_memory_per_sm = 228 * 1024;
  int shared_memory_per_block = 48 * 1024;
  int shared_memory_per_block_optin = 227 * 1024;
  int reserved_shared_memory_per_block = 1024;
  int l2_cache_size = 50 * 1024 * 1024;
  int compute_capability_major = 9;
  int compute_capability_minor = 0;
  // Times 10, the compute capability for which the kernels are compiled, if it
  // is not that of the device, whose driver compiles their PTX.
  int ptx_version = 0;
  bool cooperative_launch = true;
  bool cluster_launch = true;
  int max_portable_cluster_size = 8;
  int max_cluster_size = 16;
  // The number of blocks per SM that the occupancy queries promise but a
  // cooperative launch does not get, as if others shared the device or a tool
  // had taken registers.
  int blocks_per_sm_not_had = 0;
};

// How threads are scheduled.
struct Schedule {
  // Everything that varies follows from the seed and the launch's shape. The
  // default is the environment variable JAX_BNAR_EMULATION_SEED, or 1. Seeds 2n
  // and 2n + 1 let blocks, warps and lanes run in opposite orders, so that one
  // of the two reveals a missing barrier even in a launch of one block.
  std::uint64_t seed = 1;
  // The largest number of blocks (or clusters) that run at a time in a launch
  // that is not cooperative. It is also always less than the number that the
  // launch has, because a kernel must not count on more.
  int plain_residency = 2;
  // A launch counts as deadlocked after this many rounds in a row in which
  // every block had its turn and no block did more than poll.
  int fruitless_rounds = 10000;
};

// These settings are shared by all host threads. A launch copies them when it
// starts.
Device GetDevice();
void SetDevice(const Device& device);
Schedule GetSchedule();
void SetSchedule(const Schedule& schedule);

// Says in words why this host thread's last failed call failed. It is empty
// after a launch that succeeded.
const char* LastMessage();

// For kernels: the block's dynamic shared memory. It is aligned to 128 bytes
// and, under AddressSanitizer, has not a single byte more than the launch asked
// for.
unsigned char* DynamicShared();
std::size_t DynamicSharedSize();

unsigned ClusterRank();
unsigned ClusterSize();
// barrier.cluster, the barrier of all threads of the cluster that have not
// exited.
void ClusterArrive();
void ClusterWait();
inline void ClusterBarrier() {
  ClusterArrive();
  ClusterWait();
}
// mapa, or cluster.map_shared_rank: returns where the same byte of dynamic
// shared memory lies in the cluster's block `rank`. Any pointer up to the end
// is allowed.
void* MapShared(const void* pointer, unsigned rank);
template <typename T>
T* MapShared(T* pointer, unsigned rank) {
  return static_cast<T*>(MapShared(static_cast<const void*>(pointer), rank));
}

// cp.async, cp.async.commit_group and cp.async.wait_group. Until the running
// thread has waited for a copy, the destination is full of NaN; then it gets
// what the source holds at that time.
void StartCopy(void* shared, const void* global, std::size_t size);
void CloseCopies();
void WaitForCopies(std::uint64_t groups);

// Lets all other threads run once each before it returns.
void Yield();
// ld.acquire.gpu. It yields first.
unsigned LoadAcquire(const unsigned* pointer);
// st.release.gpu.
void StoreRelease(unsigned* pointer, unsigned value);
// The copying of 8 or 16 aligned bytes as a whole, for ld.relaxed.gpu and
// st.relaxed.gpu. It yields before a load and after a store.
void CopyRelaxed(void* to, const void* from, std::size_t size, bool store);
template <typename T>
T LoadRelaxed(const T* pointer) {
  T value;
  CopyRelaxed(&value, pointer, sizeof(T), false);
  return value;
}
template <typename T>
void StoreRelaxed(T* pointer, const T& value) {
  CopyRelaxed(pointer, &value, sizeof(T), true);
}

// Ends the launch with cudaErrorLaunchFailure and this message.
[[noreturn]] void Fail(const char* format, ...)
    __attribute__((format(printf, 1, 2)));

}  // namespace cuda_emulation

// These describe the running thread. They are __thread rather than
// thread_local, because an access then needs no call to a wrapper.
extern __thread uint3 threadIdx;
extern __thread uint3 blockIdx;
extern __thread dim3 blockDim;
extern __thread dim3 gridDim;

static constexpr int warpSize = 32;

#endif  // CUDA_EMULATION_H_
