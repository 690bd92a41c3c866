// Sums over the threads of a block and over the blocks of a team. They are
// computed in double and in an order that depends only on the tiling, so that
// the result is the same in every run, whichever multiprocessors the blocks run
// on. Nothing is updated atomically.

#ifndef JAX_BNAR_CUDA_DEVICE_TEAM_SUMS_CUH_
#define JAX_BNAR_CUDA_DEVICE_TEAM_SUMS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

__device__ __forceinline__ void Add(Sums* to, const Sums& from) {
  to->first += from.first;
  to->second += from.second;
}

__device__ __forceinline__ Sums ExchangeLanes(const Sums& sums, int distance) {
  return {__shfl_xor_sync(0xffffffffu, sums.first, distance),
          __shfl_xor_sync(0xffffffffu, sums.second, distance)};
}

// Adds the sums of those lanes of a warp that have the same columns and stores
// them. Lanes that are `distance` apart are added first, then those half as far
// apart, and so on down to row_vectors. Of the elements that two lanes share,
// each lane sends one half and adds the other half, which needs half as many
// shuffles. element(j) returns the sums of element first + j.
template <int kCount, typename F>
__device__ __forceinline__ void AddLanes(int row_vectors, int distance,
                                         int lane, int first, Sums* scratch,
                                         F element) {
  if (distance < row_vectors) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) scratch[first + j] = element(j);
    return;
  }
  if constexpr (kCount > 1) {
    constexpr int kHalf = kCount / 2;
    const bool upper = (lane & distance) != 0;
    Sums halves[kHalf];
#pragma unroll
    for (int j = 0; j < kHalf; ++j) {
      const Sums low = element(j), high = element(j + kHalf);
      const Sums sent{upper ? low.first : high.first,
                      upper ? low.second : high.second};
      halves[j] = {upper ? high.first : low.first,
                   upper ? high.second : low.second};
      Add(&halves[j], ExchangeLanes(sent, distance));
    }
    AddLanes<kHalf>(row_vectors, distance / 2, lane,
                    first + (upper ? kHalf : 0), scratch,
                    [&](int j) { return halves[j]; });
  } else {
    Sums sums = element(0);
    bool stores = true;
    for (; distance >= row_vectors; distance /= 2) {
      Add(&sums, ExchangeLanes(sums, distance));
      stores = stores && (lane & distance) == 0;
    }
    if (stores) scratch[first] = sums;
  }
}

// Adds the sums of kCount elements of each thread, from element `begin`, to
// shared.sums: those of at most kScratchColumns columns. column_of(vector, i)
// is the column of element i of a thread with this vector of a row.
template <int kCount, typename F, typename ColumnOfElement>
__device__ __forceinline__ void AddWarps(int row_vectors,
                                         const SharedMemory& shared, int begin,
                                         F element, ColumnOfElement column_of) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  AddLanes<kCount>(row_vectors, 16, lane, (lane & (row_vectors - 1)) * kCount,
                   shared.scratch + thread / 32 * kScratchColumns,
                   [&](int j) { return element(begin + j); });
  __syncthreads();
  if (thread < row_vectors * kCount) {
    Sums* to =
        shared.sums + column_of(thread / kCount, begin + thread % kCount);
    Sums sums = *to;
    // All at once would take registers that the other parts need.
#pragma unroll 2
    for (int w = 0; w < kWarps; ++w) {
      Add(&sums, shared.scratch[w * kScratchColumns + thread]);
    }
    *to = sums;
  }
  __syncthreads();
}

// Adds what the threads hold to shared.sums. element(i) returns the sums of
// this thread's element i. All threads of the block call it.
template <int kElements, typename SlabOf, typename F>
__device__ __forceinline__ void AddToBlock(const Tiling& tiling,
                                           const SharedMemory& shared,
                                           const SlabOf&, F element) {
  // Rows of more columns than the scratch memory has are added in parts.
  constexpr int kCount = kElements == 1 ? 1 : 2;
  static_assert(
      kMaxColumns / kElements * kCount <= kScratchColumns || kElements == 1,
      "a part exceeds the scratch memory");
  const auto column_of = [&](int vector, int i) {
    return ColumnOf(vector, kElements, i, SlabOf::WordStep(tiling));
  };
  if constexpr (SlabOf::kPlanes) {
    const auto all = [&](int) {
      Sums sums = element(0);
#pragma unroll
      for (int i = 1; i < kElements; ++i) Add(&sums, element(i));
      return sums;
    };
    AddWarps<1>(/*row_vectors=*/1, shared, 0, all, [](int, int) { return 0; });
  } else if (kElements == 1 ||
             tiling.row_vectors * kElements <= kScratchColumns) {
    AddWarps<kElements>(tiling.row_vectors, shared, 0, element, column_of);
  } else {
#pragma unroll
    for (int begin = 0; begin < kElements; begin += kCount) {
      AddWarps<kCount>(tiling.row_vectors, shared, begin, element, column_of);
    }
  }
}

__device__ __forceinline__ Sums LoadSums(const Sums* address) {
  // Another multiprocessor wrote this, so it must not come from this one's L1.
  const double2 sums = __ldcg(reinterpret_cast<const double2*>(address));
  return {sums.x, sums.y};
}

// Sets shared.sums[column] to the sum of `count` rows of partial sums, whose
// order depends only on the tiling. kBatch rows are read at a time, because
// each read takes most of a microsecond. before_store() is called by all
// threads when all rows have been read. All threads of the block call it.
template <int kBatch, typename F, typename BeforeStore>
__device__ __forceinline__ void AddRows(const Tiling& tiling,
                                        const SharedMemory& shared, int count,
                                        F row_column,
                                        BeforeStore before_store) {
  const int thread = static_cast<int>(threadIdx.x);
  const int columns = tiling.columns;
  const int parts = min(kThreads / columns, kWarps);
  const int part = thread / columns;
  const int column = thread - part * columns;
  if (part < parts) {
    Sums sums{0, 0};
    for (int row = part; row < count; row += kBatch * parts) {
      Sums batch[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        batch[k] = row + k * parts < count ? row_column(row + k * parts, column)
                                           : Sums{0, 0};
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) Add(&sums, batch[k]);
    }
    shared.scratch[part * columns + column] = sums;
  }
  __syncthreads();
  before_store();
  if (thread < columns) {
    Sums sums = shared.scratch[thread];
    for (int p = 1; p < parts; ++p) {
      Add(&sums, shared.scratch[p * columns + thread]);
    }
    shared.sums[thread] = sums;
  }
  __syncthreads();
}

// Sends sums to an empty box. Its two messages may arrive in either order.
__device__ __forceinline__ void Send(Mailbox* box, const Sums& sums,
                                     uint64_t tag) {
  StoreMessage(&box->first, {sums.first, tag});
  StoreMessage(&box->second, {sums.second, tag});
}

// Waits for messages in the first `count` of kCount boxes, which are `distance`
// apart, and returns its sum. Each box has one sender and one receiver, who
// leaves it empty: the launch may be repeated with the same tag.
//
// All blocks of a cooperative launch are on the device at once, so a message
// arrives within microseconds. Should one never come, the kernel ends with an
// error after about twenty seconds: a hang would say nothing, and a GPU that
// hangs may have to be reset. Polls are counted, because a clock goes on while
// a debugger or another process has the device.
constexpr int kMostPolls = 1 << 24;

template <int kCount>
__device__ __forceinline__ Sums Receive(Mailbox* boxes, int distance, int count,
                                        uint64_t tag) {
  Message first[kCount], second[kCount];
  for (int polls = 0;; ++polls) {
    bool arrived = true;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k < count) {
        first[k] = LoadMessage(&boxes[k * distance].first);
        second[k] = LoadMessage(&boxes[k * distance].second);
      }
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k < count) {
        arrived = arrived && first[k].tag == tag && second[k].tag == tag;
      }
    }
    if (arrived) break;
    if (polls == kMostPolls) __trap();
    __nanosleep(64);
  }
  Sums sums{0, 0};
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (k < count) {
      Add(&sums, {first[k].value, second[k].value});
      StoreMessage(&boxes[k * distance].first, {0, 0});
      StoreMessage(&boxes[k * distance].second, {0, 0});
    }
  }
  return sums;
}

// The threads of a block that add columns of the whole team. So many of them, a
// power of 2 that is at least the team if there are enough threads, share a
// column, and each has the messages of every `parts`-th block. Of 5 blocks with
// 8 columns, 8 threads share a column: in block 2, threads 0 to 7 add column 2
// and threads 8 to 15 column 7; thread 3 reads what block 3 has sent of column
// 2, and threads 5 to 7 read nothing. Where there are more columns than threads
// for them, a block goes on with those that lie `step` further on.
struct AdderOfTeam {
  int log_parts;
  int parts;
  int part;
  int offset;  // of this thread's column from that of the block's first thread
  int step;
};
__device__ __forceinline__ AdderOfTeam AdderOf(int thread, int team) {
  const int log_parts = min(32 - __clz(team - 1), __ffs(kThreads) - 1);
  const int parts = 1 << log_parts;
  return {log_parts, parts, thread & (parts - 1), (thread >> log_parts) * team,
          (kThreads >> log_parts) * team};
}

// Fetches the boxes in which this thread will look for messages of a slab to
// L2. Nobody has used them in this launch, so that the first look at each would
// otherwise wait for memory, in both waits of AddTeamByMessages.
__device__ __forceinline__ void PrefetchMailboxes(
    const Tiling& tiling, const Workspace& workspace,
    BlockReduction block_reduction, int64_t slab, int rank) {
  if (block_reduction != BlockReduction::kBarrier) return;
  const int thread = Anew(static_cast<int>(threadIdx.x));
  const int columns = tiling.columns;
  const int team = tiling.team;
  const int64_t boxes = slab * columns * team;
  const AdderOfTeam adder = AdderOf(thread, team);
  for (int first = rank; first < columns; first += adder.step) {
    const int column = first + adder.offset;
    if (column < columns) {
      for (int row = adder.part; row < team; row += adder.parts) {
        PrefetchToL2(workspace.partial_mailboxes + boxes + column * team + row);
      }
    }
  }
  if (thread < columns) {
    PrefetchToL2(workspace.total_mailboxes + boxes + rank * columns + thread);
  }
}

// Sets shared.sums to the sums of a team whose blocks are all on the device:
// the launch is cooperative, or a block that waits for a message would never
// get it. Each column is added by one block of the team, which sends the sum to
// all of them. Thus each block waits twice, for about as long as it takes to
// write to L2 and to read from there; meanwhile() is called in the first of
// these waits. All threads of the block call it.
template <typename F>
__device__ __forceinline__ void AddTeamByMessages(const Tiling& tiling,
                                                  const SharedMemory& shared,
                                                  const Workspace& workspace,
                                                  int64_t slab, int rank,
                                                  F meanwhile) {
  // What follows from the number of the thread is the same for all slabs, but
  // does not wait in registers for the next one.
  const int thread = Anew(static_cast<int>(threadIdx.x));
  const int columns = tiling.columns;
  const int team = tiling.team;
  const int64_t boxes = static_cast<int64_t>(columns) * team;
  Mailbox* partials = workspace.partial_mailboxes + slab * boxes;
  Mailbox* totals = workspace.total_mailboxes + slab * boxes;
  if (thread < columns) {
    Send(partials + thread * team + rank, shared.sums[thread], workspace.tag);
  }
  meanwhile();

  const AdderOfTeam adder = AdderOf(thread, team);
  const int parts = adder.parts;
  for (int first = rank; first < columns; first += adder.step) {
    const int column = first + adder.offset;
    Sums sums{0, 0};
    if (column < columns) {
      for (int row = adder.part; row < team; row += 2 * parts) {
        Add(&sums, Receive<2>(partials + column * team + row, parts,
                              row + parts < team ? 2 : 1, workspace.tag));
      }
    }
    for (int distance = min(parts, 32) / 2; distance > 0; distance /= 2) {
      Add(&sums, ExchangeLanes(sums, distance));
    }
    if (parts > 32) {
      if (thread % 32 == 0) shared.scratch[thread / 32] = sums;
      __syncthreads();
      const int warp = (thread >> adder.log_parts) << (adder.log_parts - 5);
      sums = shared.scratch[warp];
      for (int w = 1; w < parts / 32; ++w) Add(&sums, shared.scratch[warp + w]);
      __syncthreads();  // The scratch memory is free for the next column.
    }
    if (column < columns) {
      for (int to = adder.part; to < team; to += parts) {
        Send(totals + to * columns + column, sums, workspace.tag);
      }
    }
  }
  if (thread < columns) {
    shared.sums[thread] =
        Receive<1>(totals + rank * columns + thread, 0, 1, workspace.tag);
  }
  __syncthreads();
}

// The column, if any, that a thread prepares while its block waits for the
// team. The first threads are the ones that send and receive messages.
__device__ __forceinline__ int ColumnMeanwhile() {
  return kThreads - 1 - static_cast<int>(threadIdx.x);
}

// Sets shared.sums to the sums of the whole team, in each of its blocks, where
// it has those of this block. block_reduction is kSingleBlock, kCluster or
// kBarrier. All threads of the block call it, and shared.sums must be complete.
// meanwhile() is called by all threads while the block would only wait. What it
// writes to shared memory, they may all read afterwards.
template <typename F>
__device__ __forceinline__ void AddTeam(const Tiling& tiling,
                                        const SharedMemory& shared,
                                        const Workspace& workspace,
                                        BlockReduction block_reduction,
                                        int64_t slab, int rank, F meanwhile) {
  if (block_reduction == BlockReduction::kSingleBlock) {
    meanwhile();
    __syncthreads();
    return;
  }
  if (block_reduction == BlockReduction::kCluster) {
    ArriveAtCluster();
    meanwhile();
    WaitForCluster();
    // No block may leave, or write to its shared.sums, while others read it.
    // What they read, they have added already.
    AddRows<2>(
        tiling, shared, tiling.team,
        [&](int row, int column) {
          return LoadFromBlock(shared.sums + column,
                               static_cast<uint32_t>(row));
        },
        [] {
          ArriveAtCluster();
          WaitForCluster();
        });
    return;
  }
  AddTeamByMessages(tiling, shared, workspace, slab, rank, meanwhile);
}

// The partial sums of a slab in the workspace: [rank][column].
__device__ __forceinline__ Sums* PartialsOf(const Tiling& tiling,
                                            const Workspace& workspace,
                                            int64_t slab) {
  return workspace.partials + slab * tiling.team * tiling.columns;
}

// Writes the sums of this block to the workspace.
__device__ __forceinline__ void StorePartials(const Tiling& tiling,
                                              const SharedMemory& shared,
                                              const Workspace& workspace,
                                              int64_t slab, int rank) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < tiling.columns) {
    PartialsOf(tiling, workspace, slab)[rank * tiling.columns + thread] =
        shared.sums[thread];
  }
}

// Sets shared.sums to the sums of all blocks of the team, which must be in the
// workspace. All threads of the block call it.
__device__ __forceinline__ void AddPartials(const Tiling& tiling,
                                            const SharedMemory& shared,
                                            const Workspace& workspace,
                                            int64_t slab) {
  const Sums* partials = PartialsOf(tiling, workspace, slab);
  AddRows<8>(
      tiling, shared, tiling.team,
      [&](int row, int column) {
        return LoadSums(partials + row * tiling.columns + column);
      },
      [] {});
}

// Does what AddTeam does, without waiting. block_reduction is kSingleBlock or
// kLastBlock. Returns true in a block that has the sums: the one that comes
// last or, where two cannot tell, both of them. All threads of the block call
// it.
__device__ __forceinline__ bool AddTeamInLast(const Tiling& tiling,
                                              const SharedMemory& shared,
                                              const Workspace& workspace,
                                              BlockReduction block_reduction,
                                              int64_t slab, int rank) {
  if (block_reduction == BlockReduction::kSingleBlock) {
    return true;
  }
  const int thread = static_cast<int>(threadIdx.x);
  uint64_t* flags = workspace.flags + slab * tiling.team;
  StorePartials(tiling, shared, workspace, slab, rank);
  __syncthreads();
  if (thread == 0) {
    OrderMemory();  // The sums come before the flag.
    StoreFlag(flags + rank, workspace.tag);
    // Of two blocks, at least one sees the flag of the other, because each
    // writes its own before this fence, which is sequentially consistent, and
    // reads that of the other after it.
    __threadfence();
  }
  __syncthreads();
  bool missing = false;
  for (int other = thread; other < tiling.team; other += kThreads) {
    missing = missing || LoadFlag(flags + other) != workspace.tag;
  }
  // The flags that this thread has read come before the sums that any thread
  // of the block reads after the barrier.
  OrderMemory();
  if (__syncthreads_or(missing)) return false;
  AddPartials(tiling, shared, workspace, slab);
  // The launch may be repeated with the same tag. A block that misses a flag
  // which was taken away here leaves the sums to this one.
  for (int other = thread; other < tiling.team; other += kThreads) {
    StoreFlag(flags + other, 0);
  }
  return true;
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_TEAM_SUMS_CUH_
