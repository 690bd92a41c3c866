#include "scheduler.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

#include "random.h"

#if CUDA_EMULATION_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

__thread uint3 threadIdx;
__thread uint3 blockIdx;
__thread dim3 blockDim;
__thread dim3 gridDim;

namespace cuda_emulation {

__thread Thread* current = nullptr;
__thread Scheduler* scheduler = nullptr;

namespace {

// A launch that goes on for longer counts as endless.
constexpr std::uint64_t kMaxRounds = 20'000'000;

int Count(std::uint32_t lanes) { return __builtin_popcount(lanes); }

#if CUDA_EMULATION_ASAN
// A sanitizer's report says what was wrong, but not in which thread.
void PrintWhere() {
  if (current == nullptr) return;
  std::fprintf(stderr,
               "in the emulated thread (%u, %u, %u) of block (%u, %u, %u)\n",
               threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y,
               blockIdx.z);
}
#endif

}  // namespace

Scheduler& HostScheduler() {
  static thread_local Scheduler own;
  return own;
}

Scheduler::Scheduler() : pool_(&FiberMain) {
#if CUDA_EMULATION_ASAN
  __sanitizer_set_death_callback(&PrintWhere);
#endif
}

std::uint64_t Scheduler::Random() { return random_ = Mix(random_); }

cudaError_t Scheduler::Run(const Grid& grid) {
  grid_ = grid;
  failed_ = false;
  message_[0] = '\0';
  pair_ = Mix(grid.schedule.seed >> 1);
  second_ = (grid.schedule.seed & 1) != 0;
  random_ = Mix(pair_);
  host_ = Fiber();

  const dim3& g = grid.grid;
  const dim3& c = grid.cluster;
  const std::uint64_t clusters =
      std::uint64_t{g.x / c.x} * (g.y / c.y) * (g.z / c.z);
  queue_.resize(clusters);
  std::iota(queue_.begin(), queue_.end(), 0u);
  Shuffle(queue_.data(), queue_.size(), pair_);
  if (second_) std::reverse(queue_.begin(), queue_.end());
  next_in_queue_ = 0;

  const std::size_t resident = grid.resident_clusters;
  if (!pool_.Reserve(resident * Product(c) * Product(grid.block))) {
    std::snprintf(message_, sizeof(message_),
                  "no stacks for %zu resident clusters of %u blocks of %u "
                  "threads",
                  resident, Product(c), Product(grid.block));
    return cudaErrorMemoryAllocation;
  }
  if (clusters_.size() < resident) clusters_.resize(resident);
  turns_.clear();
  live_clusters_ = 0;
  for (std::size_t i = 0; i < resident; ++i) {
    Prepare(&clusters_[i]);
    if (StartCluster(&clusters_[i])) ++live_clusters_;
    for (unsigned b = 0; b < Product(c); ++b) {
      turns_.push_back(&clusters_[i].blocks[b]);
    }
  }
  turn_ = turns_.size();
  block_ = nullptr;
  warp_ = nullptr;
  any_ran_ = true;
  fruitless_rounds_ = 0;
  rounds_ = 0;

  scheduler = this;
  blockDim = grid_.block;
  gridDim = grid_.grid;
  StartOn(Next(), nullptr);
  SwitchFiber(&host_, running_);
  current = nullptr;
  if (!failed_) return cudaSuccess;
  pool_.Abandon();
  for (Block* block : turns_) block->shared.Finish();
  return cudaErrorLaunchFailure;
}

Thread* Scheduler::NextReady() {
  // The bit `rotation` comes first, or last if the order is reversed.
  const unsigned r = warp_->rotation;
  const std::uint32_t ready = warp_->ready;
  const std::uint32_t rotated = ready >> r | ready << (-r & 31);
  const int bit =
      warp_->reversed ? 31 - __builtin_clz(rotated) : __builtin_ctz(rotated);
  const unsigned lane = (static_cast<unsigned>(bit) + r) & 31;
  const auto warp = static_cast<std::size_t>(warp_ - block_->warps.data());
  return &block_->threads[warp * kWarpSize + lane];
}

Thread* Scheduler::Next() {
  for (;;) {
    if (warp_ != nullptr && warp_->ready != 0) {
      any_ran_ = true;
      return NextReady();
    }
    warp_ = nullptr;
    while (block_ != nullptr && cursor_ < block_->warps_count) {
      Warp* warp = &block_->warps[block_->order[cursor_++]];
      warp->ready |= warp->yielded;
      warp->yielded = 0;
      if (warp->ready != 0) {
        warp_ = warp;
        break;
      }
    }
    if (warp_ != nullptr) continue;
    if (live_clusters_ == 0) return nullptr;
    NextBlock();
  }
}

void Scheduler::NextBlock() {
  if (turn_ >= turns_.size()) NextRound();
  block_ = turns_[second_ ? turns_.size() - 1 - turn_ : turn_];
  ++turn_;
  cursor_ = 0;
  // A block that only polls between barriers must not keep the others waiting.
  barriers_left_ = 1 + Random() % 4;
}

void Scheduler::NextRound() {
  if (!any_ran_) FailWithWaiters("deadlock: no thread can go on");
  if (++fruitless_rounds_ > grid_.schedule.fruitless_rounds) {
    FailWithWaiters("deadlock: threads poll for what does not happen");
  }
  if (++rounds_ > kMaxRounds) FailWithWaiters("the launch does not end");
  any_ran_ = false;
  turn_ = 0;
  Shuffle(turns_.data(), turns_.size(), Mix(pair_ + rounds_));
}

void Scheduler::FailWithWaiters(const char* what) {
  int polling = 0, barrier = 0, cluster = 0, operation = 0, exited = 0;
  const Block* stuck = nullptr;
  for (const Block* block : turns_) {
    if (block->exited < block->threads_count && stuck == nullptr) stuck = block;
    for (unsigned i = 0; i < block->warps_count; ++i) {
      const Warp& warp = block->warps[i];
      polling += Count(warp.yielded | warp.ready);
      barrier += Count(warp.at_barrier);
      cluster += Count(warp.at_cluster_barrier);
      operation += Count(warp.in_operation);
      exited += Count(warp.exited);
    }
  }
  const uint3 index = stuck == nullptr ? uint3{} : stuck->index;
  const std::size_t waiting_clusters = queue_.size() - next_in_queue_;
  cuda_emulation::Fail(
      "%s; of the resident blocks' threads %d poll, %d are at __syncthreads, "
      "%d at the cluster's barrier, %d in a warp's operation, %d have exited; "
      "%zu blocks or clusters have not started; block (%u, %u, %u) is one of "
      "those that wait",
      what, polling, barrier, cluster, operation, exited, waiting_clusters,
      index.x, index.y, index.z);
}

void Scheduler::StartOn(Thread* thread, Fiber* fiber) {
  if (thread->fiber == nullptr) {
    thread->fiber = fiber != nullptr ? fiber : pool_.Take();
  }
  current = thread;
  threadIdx = thread->index;
  blockIdx = thread->block->index;
  running_ = thread->fiber;
}

std::uint32_t Scheduler::Suspend() {
  Thread* thread = current;
  const std::uint32_t bit = 1u << thread->lane;
  thread->warp->ready &= ~bit;
  return bit;
}

void Scheduler::Switch() {
  Thread* next = Next();
  if (next == current) return;
  Fiber* from = running_;
  StartOn(next, nullptr);
  SwitchFiber(from, running_);
}

void Scheduler::Yield() {
  Thread* thread = current;
  thread->block->phases_without_yield = 0;
  thread->warp->yielded |= Suspend();
  Switch();
}

void Scheduler::FiberMain() {
  Scheduler& self = *scheduler;
  for (;;) {
    self.grid_.call.run(self.grid_.call.bound);
    Fiber* fiber = self.running_;
    self.Exit(current);
    current->fiber = nullptr;
    Thread* next = self.Next();
    if (next != nullptr && next->fiber == nullptr) {
      // The same stack serves the next thread.
      self.StartOn(next, fiber);
      continue;
    }
    self.pool_.Give(fiber);
    if (next == nullptr) {
      self.running_ = &self.host_;
    } else {
      self.StartOn(next, nullptr);
    }
    SwitchFiber(fiber, self.running_);
  }
}

void Scheduler::Fail(const char* format, std::va_list arguments) {
  std::vsnprintf(message_, sizeof(message_), format, arguments);
  failed_ = true;
  // This switch is final, because the fibers are abandoned.
  SwitchFiber(running_, &host_);
  __builtin_trap();
}

void Fail(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  if (current == nullptr) {
    std::vfprintf(stderr, format, arguments);
    std::fprintf(stderr, " (outside of kernels)\n");
    std::abort();
  }
  scheduler->Fail(format, arguments);
}

}  // namespace cuda_emulation
