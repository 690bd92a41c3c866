// How blocks arrive on the device, pass their barriers and leave it.

#include <utility>

#include "random.h"
#include "scheduler.h"

namespace cuda_emulation {
namespace {

// This many barriers in a row without a thread of the block polling between
// them count as progress. Fewer may be the body of a loop that polls.
constexpr unsigned kBarriersOfProgress = 16;

}  // namespace

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
    block->threads[i].copies.clear();
    block->threads[i].copy_groups = 0;
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

// Two neighbouring blocks share a permutation, which is reversed for the second
// one; it is also reversed in every other phase of a block and, with the next
// seed, in all phases. Of any two threads, each therefore comes first in some
// block, phase or run, so that where a barrier is missing, something goes
// wrong, whether a thread reads too early or writes too early.
void Scheduler::NewOrder(Block* block) {
  const bool reversed =
      (((block->linear_index ^ block->phase) & 1) != 0) != second_;
  const std::uint64_t seed =
      Mix(pair_ ^ Mix((block->linear_index >> 1) ^ (block->phase >> 1) << 40));
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
  bool progress = true;
  for (unsigned rank = 0; rank < Product(grid_.cluster); ++rank) {
    Block* block = &cluster->blocks[rank];
    if (block->exited == block->threads_count) continue;
    ++block->phase;
    progress &= ++block->phases_without_yield >= kBarriersOfProgress;
    NewOrder(block);
    for (unsigned i = 0; i < block->warps_count; ++i) {
      Warp& warp = block->warps[i];
      warp.ready |= warp.at_cluster_barrier;
      warp.at_cluster_barrier = 0;
    }
  }
  cursor_ = 0;
  if (progress) Progress();
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
  if (!thread->copies.empty()) {
    cuda_emulation::Fail(
        "thread (%u, %u, %u) of block (%u, %u, %u) exits and has not waited "
        "for %zu of its copies to shared memory",
        thread->index.x, thread->index.y, thread->index.z, block->index.x,
        block->index.y, block->index.z, thread->copies.size());
  }
  if (thread->warp->in_operation != 0) LeaveWarp(thread->warp);
  if (thread->in_cluster_phase && thread->cluster_phase == cluster->phase) {
    // The thread had arrived, but it is no longer among those that are waited
    // for.
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

}  // namespace cuda_emulation
