// Barriers of blocks and clusters, yielding, and shared memory: everything that
// a kernel calls except warp operations.

#include <cstdint>
#include <cstring>

#include "cuda_emulation/atomics.h"
#include "cuda_emulation/synchronization.h"
#include "scheduler.h"

namespace cuda_emulation {

int BlockBarrier(BarrierKind kind, bool predicate) {
  Thread* thread = current;
  Block* block = thread->block;
  if (block->exited != 0) {
    Fail(
        "divergent __syncthreads: %u threads of block (%u, %u, %u) have "
        "exited, thread (%u, %u, %u) comes to wait for them",
        block->exited, block->index.x, block->index.y, block->index.z,
        thread->index.x, thread->index.y, thread->index.z);
  }
  if (block->arrived == 0) {
    block->barrier_kind = kind;
  } else if (kind != block->barrier_kind) {
    Fail(
        "divergent __syncthreads: threads of block (%u, %u, %u) come to "
        "different ones of _or, _and, _count and the plain one",
        block->index.x, block->index.y, block->index.z);
  }
  block->votes += predicate ? 1 : 0;
  thread->warp->at_barrier |= scheduler->Suspend();
  if (++block->arrived == block->threads_count) {
    switch (kind) {
      case BarrierKind::kPlain:
      case BarrierKind::kCount:
        block->result = static_cast<int>(block->votes);
        break;
      case BarrierKind::kOr:
        block->result = block->votes != 0;
        break;
      case BarrierKind::kAnd:
        block->result = block->votes == block->threads_count;
        break;
    }
    scheduler->ReleaseBlock(block);
  }
  scheduler->Switch();
  // The next phase cannot end before this thread has arrived in it.
  return block->result;
}

void ClusterArrive() {
  Thread* thread = current;
  Cluster* cluster = thread->block->cluster;
  if (thread->in_cluster_phase) {
    Fail("a thread arrives at the cluster's barrier twice without waiting");
  }
  thread->in_cluster_phase = true;
  thread->cluster_phase = cluster->phase;
  if (++cluster->arrived == cluster->live_threads) {
    scheduler->ReleaseCluster(cluster);
  }
}

void ClusterWait() {
  Thread* thread = current;
  Cluster* cluster = thread->block->cluster;
  if (!thread->in_cluster_phase) {
    Fail("a thread waits at the cluster's barrier without having arrived");
  }
  if (thread->cluster_phase == cluster->phase) {
    thread->warp->at_cluster_barrier |= scheduler->Suspend();
    scheduler->Switch();
  }
  thread->in_cluster_phase = false;
}

unsigned ClusterRank() { return current->block->rank; }

unsigned ClusterSize() {
  const dim3& size = scheduler->cluster_size();
  return size.x * size.y * size.z;
}

unsigned char* DynamicShared() { return current->block->shared.data(); }

std::size_t DynamicSharedSize() { return current->block->shared.size(); }

void* MapShared(const void* pointer, unsigned rank) {
  Block* own = current->block;
  const auto* byte = static_cast<const unsigned char*>(pointer);
  if (byte < own->shared.data() ||
      byte > own->shared.data() + own->shared.size()) {
    Fail("MapShared: the pointer is not into the block's own shared memory");
  }
  if (rank >= ClusterSize()) {
    Fail("MapShared: rank %u of a cluster of %u blocks", rank, ClusterSize());
  }
  Block& other = own->cluster->blocks[rank];
  if (other.exited == other.threads_count) {
    Fail("MapShared: the cluster's block %u has exited", rank);
  }
  return other.shared.data() + (byte - own->shared.data());
}

void Yield() {
  if (current != nullptr) scheduler->Yield();
}

void AfterAtomic(bool changed) {
  if (current == nullptr) return;
  if (changed) scheduler->Progress();
  scheduler->Yield();
}

unsigned LoadAcquire(const unsigned* pointer) {
  Yield();
  return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}

void CopyRelaxed(void* to, const void* from, std::size_t size, bool store) {
  const void* memory = store ? to : from;
  if ((size != 8 && size != 16) ||
      reinterpret_cast<std::uintptr_t>(memory) % size != 0) {
    Fail("a relaxed access of %zu bytes at %p", size, memory);
  }
  if (!store) Yield();
  const bool changed = store && std::memcmp(to, from, size) != 0;
  // Only one thread of a launch runs at a time.
  std::memcpy(to, from, size);
  if (store) AfterAtomic(changed);
}

void StoreRelease(unsigned* pointer, unsigned value) {
  AfterAtomic(__atomic_exchange_n(pointer, value, __ATOMIC_ACQ_REL) != value);
}

}  // namespace cuda_emulation
