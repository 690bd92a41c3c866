// Runs one launch on the calling host thread: manages the resident clusters,
// decides which thread runs next, and notices when none can.

#ifndef CUDA_EMULATION_SCHEDULER_H_
#define CUDA_EMULATION_SCHEDULER_H_

#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_emulation.h"
#include "cuda_emulation/launch.h"
#include "fiber.h"
#include "state.h"

namespace cuda_emulation {

// A launch whose configuration has been checked.
struct Grid {
  dim3 grid;
  dim3 block;
  dim3 cluster;
  std::size_t shared_size;
  std::uint64_t resident_clusters;
  Call call;
  Schedule schedule;
};

class Scheduler {
 public:
  Scheduler();

  // Returns cudaSuccess, or an error that message() explains.
  cudaError_t Run(const Grid& grid);
  const char* message() const { return message_; }
  const dim3& cluster_size() const { return grid_.cluster; }

  // The running thread calls the functions that follow.

  // Lets others run until the running thread is ready again.
  void Switch();
  // Removes the running thread from the set of ready ones, and returns its bit.
  std::uint32_t Suspend();
  void Yield();
  // Is called when something happened that other threads may have waited for.
  void Progress() { fruitless_rounds_ = 0; }
  // Is called when all threads of the block have arrived at its barrier.
  void ReleaseBlock(Block* block);
  // Is called when all living threads of the cluster have arrived at its
  // barrier.
  void ReleaseCluster(Cluster* cluster);
  [[noreturn]] void Fail(const char* format, std::va_list arguments);

 private:
  static void FiberMain();
  void Prepare(Cluster* cluster);
  bool StartCluster(Cluster* cluster);
  void StartBlock(Block* block, const dim3& index);
  void NewOrder(Block* block);
  void Exit(Thread* thread);
  // Returns the thread to run, or null when the launch is complete.
  Thread* Next();
  Thread* NextReady();
  void NextBlock();
  void NextRound();
  [[noreturn]] void FailWithWaiters(const char* what);
  void StartOn(Thread* thread, Fiber* fiber);
  std::uint64_t Random();

  FiberPool pool_;
  Fiber host_;
  Fiber* running_ = nullptr;
  Grid grid_;
  std::vector<Cluster> clusters_;
  // The order in which clusters start.
  std::vector<std::uint32_t> queue_;
  std::size_t next_in_queue_ = 0;
  std::uint64_t live_clusters_ = 0;
  // The second of the two seeds of a pair has its orders reversed.
  std::uint64_t pair_ = 0;
  bool second_ = false;
  std::uint64_t random_ = 0;

  // The blocks in the order of their turns: each resident block has one turn in
  // each round.
  std::vector<Block*> turns_;
  std::size_t turn_ = 0;
  Block* block_ = nullptr;  // The block whose turn it is.
  unsigned cursor_ = 0;     // A position in its order of warps.
  Warp* warp_ = nullptr;    // The warp that runs.
  unsigned barriers_left_ = 0;
  bool any_ran_ = false;  // Whether any thread ran in this round.
  int fruitless_rounds_ = 0;
  std::uint64_t rounds_ = 0;

  bool failed_ = false;
  char message_[1024] = "";
};

// The running thread of this host thread's launch, or null.
extern __thread Thread* current;
extern __thread Scheduler* scheduler;
// Returns this host thread's scheduler, for its next launch.
Scheduler& HostScheduler();
// Is called after a thread's exit was recorded. Completes those operations of
// its warp that waited for nothing else.
void LeaveWarp(Warp* warp);

}  // namespace cuda_emulation

#endif  // CUDA_EMULATION_SCHEDULER_H_
