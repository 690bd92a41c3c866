#include "scheduler.h"

#include <cstdio>
#include <cstring>
#include <numeric>

__thread uint3 threadIdx;
__thread uint3 blockIdx;
__thread dim3 blockDim;
__thread dim3 gridDim;

namespace cuda_emulation {

__thread Thread* current = nullptr;

namespace {

// A launch that goes on for longer is taken for endless.
constexpr std::uint64_t kMaxRounds = 200'000'000;
// So many barriers in succession between which no thread of the block polls
// are progress; fewer may be the body of a loop that polls.
constexpr unsigned kBarriersOfProgress = 16;

// splitmix64: a good mix of all bits.
std::uint64_t Mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

template <typename T>
void Shuffle(T* items, std::size_t count, std::uint64_t seed) {
  for (std::size_t i = count; i > 1; --i) {
    seed = Mix(seed);
    std::swap(items[i - 1], items[seed % i]);
  }
}

unsigned Product(const dim3& d) { return d.x * d.y * d.z; }

int Count(std::uint32_t lanes) { return __builtin_popcount(lanes); }

}  // namespace

Scheduler& CurrentScheduler() {
  static thread_local Scheduler scheduler;
  return scheduler;
}

Scheduler::Scheduler() : pool_(&FiberMain) {}

std::uint64_t Scheduler::Random() { return random_ = Mix(random_); }

cudaError_t Scheduler::Run(const Grid& grid) {
  grid_ = grid;
  failed_ = false;
  message_[0] = '\0';
  random_ = Mix(grid.schedule.seed ^ Mix(Product(grid.block)));
  host_ = Fiber();

  const dim3& g = grid.grid;
  const dim3& c = grid.cluster;
  const std::uint64_t clusters =
      std::uint64_t{g.x / c.x} * (g.y / c.y) * (g.z / c.z);
  queue_.resize(clusters);
  std::iota(queue_.begin(), queue_.end(), 0u);
  Shuffle(queue_.data(), queue_.size(), Random());
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

void Scheduler::Prepare(Cluster* cluster) {
  const unsigned threads = Product(grid_.block);
  const unsigned warps = (threads + kWarpSize - 1) / kWarpSize;
  if (cluster->blocks.size() < Product(grid_.cluster)) {
    cluster->blocks.resize(Product(grid_.cluster));
  }
  for (unsigned rank = 0; rank < Product(grid_.cluster); ++rank) {
    Block& block = cluster->blocks[rank];
    block.cluster = cluster;
    block.rank = rank;
    block.threads_count = threads;
    block.warps_count = warps;
    if (block.threads.size() < threads) block.threads.resize(threads);
    if (block.warps.size() < warps) block.warps.resize(warps);
    uint3 index = {0, 0, 0};
    for (unsigned i = 0; i < threads; ++i) {
      Thread& thread = block.threads[i];
      thread.index = index;
      thread.block = &block;
      thread.warp = &block.warps[i / kWarpSize];
      thread.lane = i % kWarpSize;
      if (++index.x == grid_.block.x) {
        index.x = 0;
        if (++index.y == grid_.block.y) {
          index.y = 0;
          ++index.z;
        }
      }
    }
  }
}

bool Scheduler::StartCluster(Cluster* cluster) {
  if (next_in_queue_ == queue_.size()) return false;
  const std::uint32_t number = queue_[next_in_queue_++];
  const dim3& c = grid_.cluster;
  const unsigned along_x = grid_.grid.x / c.x;
  const unsigned along_y = grid_.grid.y / c.y;
  const dim3 corner(number % along_x * c.x, number / along_x % along_y * c.y,
                    number / along_x / along_y * c.z);
  cluster->live_blocks = Product(c);
  cluster->live_threads = Product(c) * Product(grid_.block);
  cluster->arrived = 0;
  cluster->phase = 0;
  for (unsigned rank = 0; rank < Product(c); ++rank) {
    StartBlock(&cluster->blocks[rank],
               dim3(corner.x + rank % c.x, corner.y + rank / c.x % c.y,
                    corner.z + rank / c.x / c.y));
  }
  return true;
}

void Scheduler::StartBlock(Block* block, const dim3& index) {
  block->index = index;
  block->linear_index =
      (std::uint64_t{index.z} * grid_.grid.y + index.y) * grid_.grid.x +
      index.x;
  block->exited = 0;
  block->arrived = 0;
  block->votes = 0;
  block->phase = 0;
  block->phases_without_yield = 0;
  for (unsigned i = 0; i < block->threads_count; ++i) {
    block->threads[i].fiber = nullptr;
    block->threads[i].in_cluster_phase = false;
  }
  for (unsigned i = 0; i < block->warps_count; ++i) {
    Warp& warp = block->warps[i];
    const unsigned lanes = block->threads_count - i * kWarpSize;
    warp.present = lanes >= kWarpSize ? ~0u : (1u << lanes) - 1;
    warp.ready = warp.present;
    warp.yielded = warp.in_operation = warp.at_barrier = 0;
    warp.at_cluster_barrier = warp.exited = 0;
  }
  NewOrder(block);
  block->shared.Start(grid_.shared_size);
}

// Two blocks share a permutation, the second has it reversed, and so has each
// block in every other phase. Thus of any two threads each comes first in some
// block and phase, whatever the seed: what a missing barrier would order goes
// wrong, and what reads too early as well as what writes too early.
void Scheduler::NewOrder(Block* block) {
  const bool reversed = ((block->linear_index ^ block->phase) & 1) != 0;
  std::uint64_t seed =
      Mix(grid_.schedule.seed ^
          Mix((block->linear_index >> 1) ^ (block->phase >> 1) << 40));
  for (unsigned i = 0; i < block->warps_count; ++i) {
    block->order[i] = static_cast<unsigned char>(i);
  }
  Shuffle(block->order, block->warps_count, seed);
  if (reversed) {
    for (unsigned i = 0; i < block->warps_count / 2; ++i) {
      std::swap(block->order[i], block->order[block->warps_count - 1 - i]);
    }
  }
  for (unsigned i = 0; i < block->warps_count; ++i) {
    Warp& warp = block->warps[i];
    warp.rotation = static_cast<unsigned>(seed >> i % 32) & 31;
    warp.reversed = reversed;
  }
}

Thread* Scheduler::NextReady() {
  // The bit `rotation` comes first, or last of all if reversed.
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
  block_ = turns_[turn_++];
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
  Shuffle(turns_.data(), turns_.size(), Random());
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

void Scheduler::ReleaseBlock(Block* block) {
  block->arrived = 0;
  block->votes = 0;
  ++block->phase;
  if (++block->phases_without_yield >= kBarriersOfProgress) Progress();
  NewOrder(block);
  for (unsigned i = 0; i < block->warps_count; ++i) {
    Warp& warp = block->warps[i];
    warp.ready = warp.present;
    warp.at_barrier = 0;
  }
  warp_ = nullptr;
  cursor_ = 0;
  if (--barriers_left_ == 0) block_ = nullptr;
}

void Scheduler::ReleaseCluster(Cluster* cluster) {
  cluster->arrived = 0;
  ++cluster->phase;
  for (unsigned rank = 0; rank < Product(grid_.cluster); ++rank) {
    Block* block = &cluster->blocks[rank];
    if (block->exited == block->threads_count) continue;
    ++block->phase;
    NewOrder(block);
    for (unsigned i = 0; i < block->warps_count; ++i) {
      Warp& warp = block->warps[i];
      warp.ready |= warp.at_cluster_barrier;
      warp.at_cluster_barrier = 0;
    }
  }
  cursor_ = 0;
}

void Scheduler::Exit(Thread* thread) {
  Block* block = thread->block;
  Cluster* cluster = block->cluster;
  thread->warp->exited |= Suspend();
  ++block->exited;
  --cluster->live_threads;
  Progress();
  if (block->arrived != 0) {
    cuda_emulation::Fail(
        "divergent __syncthreads: thread (%u, %u, %u) of block (%u, %u, %u) "
        "exits while %u threads of the block wait there",
        thread->index.x, thread->index.y, thread->index.z, block->index.x,
        block->index.y, block->index.z, block->arrived);
  }
  if (thread->warp->in_operation != 0) LeaveWarp(thread->warp);
  if (thread->in_cluster_phase && thread->cluster_phase == cluster->phase) {
    // It had arrived: it is no longer among those that are waited for.
    --cluster->arrived;
  }
  if (cluster->arrived != 0 && cluster->arrived == cluster->live_threads) {
    ReleaseCluster(cluster);
  }
  if (block->exited < block->threads_count) return;
  if (!block->shared.Finish()) {
    cuda_emulation::Fail(
        "block (%u, %u, %u) wrote outside of its %zu bytes of dynamic shared "
        "memory",
        block->index.x, block->index.y, block->index.z, block->shared.size());
  }
  if (--cluster->live_blocks != 0) return;
  if (!StartCluster(cluster)) --live_clusters_;
  block_ = nullptr;
  warp_ = nullptr;
}

void Scheduler::FiberMain() {
  Scheduler& self = CurrentScheduler();
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
  // For good: the fibers are abandoned.
  SwitchFiber(running_, &host_);
  __builtin_trap();
}

void Fail(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  CurrentScheduler().Fail(format, arguments);
}

}  // namespace cuda_emulation
