// What the emulation knows about a running launch: clusters of blocks of warps
// of threads. Sets of lanes are stored as the bits of a word.

#ifndef CUDA_EMULATION_STATE_H_
#define CUDA_EMULATION_STATE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda_emulation.h"
#include "cuda_emulation/synchronization.h"
#include "fiber.h"
#include "shared_memory.h"

namespace cuda_emulation {

constexpr unsigned kWarpSize = 32;
constexpr unsigned kMaxThreadsPerBlock = 1024;

inline unsigned Product(const dim3& d) { return d.x * d.y * d.z; }

struct Block;
struct Cluster;

// A lane's part in an operation of its warp.
struct LaneOperation {
  WarpOperation operation;
  unsigned mask;
  int argument;
  int width;
  std::uint64_t value;
  std::uint64_t result;
};

struct Warp {
  std::uint32_t present;
  // Each present lane is in exactly one of these sets.
  std::uint32_t ready;    // Includes the running lane.
  std::uint32_t yielded;  // Ready when the warp's turn comes again.
  std::uint32_t in_operation;
  std::uint32_t at_barrier;  // At the barrier of the block.
  std::uint32_t at_cluster_barrier;
  std::uint32_t exited;
  // Lanes run from `rotation` upwards or, if reversed, from there downwards.
  unsigned rotation;
  bool reversed;
  LaneOperation lanes[kWarpSize];
};

// A copy to shared memory that the thread has started and not waited for.
struct Copy {
  unsigned char* to;
  const unsigned char* from;
  std::size_t size;
  std::uint64_t group;
  unsigned char was[16];  // what `from` held when the copy was started
};

struct Thread {
  uint3 index;
  Fiber* fiber;  // Null before the thread starts and after it exits.
  Block* block;
  Warp* warp;
  unsigned lane;
  bool in_cluster_phase;  // Has arrived but not waited yet.
  unsigned cluster_phase;
  std::vector<Copy> copies;   // In the order in which they were started.
  std::uint64_t copy_groups;  // How many groups of copies are closed.
};

struct Block {
  uint3 index;
  std::uint64_t linear_index;
  Cluster* cluster;
  unsigned rank;  // The rank in the cluster.
  unsigned threads_count;
  unsigned exited;
  unsigned warps_count;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  SharedMemory shared;

  // The barrier of the phase in progress.
  BarrierKind barrier_kind;
  unsigned arrived;
  unsigned votes;
  int result;  // The result of the last phase.
  // A phase ends with a barrier, and each phase has another order of warps.
  std::uint64_t phase;
  unsigned phases_without_yield;
  unsigned char order[kMaxThreadsPerBlock / kWarpSize];
};

// A block that was launched without a cluster is a cluster of its own.
struct Cluster {
  std::vector<Block> blocks;
  unsigned live_blocks;
  unsigned live_threads;
  unsigned arrived;
  unsigned phase;
};

}  // namespace cuda_emulation

#endif  // CUDA_EMULATION_STATE_H_
