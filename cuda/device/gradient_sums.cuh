// Sums of e and of e * (x - mean), with e = dy where the ReLU was open.

#ifndef JAX_BNAR_CUDA_DEVICE_GRADIENT_SUMS_CUH_
#define JAX_BNAR_CUDA_DEVICE_GRADIENT_SUMS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/gate.cuh"
#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/slab.cuh"
#include "cuda/device/team_sums.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "native/numerics.h"

namespace jax_bnar {
namespace cuda {

// What a block keeps of a tile: e and x.
template <typename T, int kElements>
struct GradientPair {
  Vector<T, kElements> e;
  Vector<T, kElements> x;
};

// Two tiles of shared memory hold one pair.
template <typename T, int kElements>
__device__ __forceinline__ void StorePair(
    const SharedMemory& shared, int tile,
    const GradientPair<T, kElements>& pair) {
  StoreTile(shared, 2 * tile, pair.e);
  StoreTile(shared, 2 * tile + 1, pair.x);
}

template <typename T, int kElements>
__device__ __forceinline__ GradientPair<T, kElements> LoadPair(
    const SharedMemory& shared, int tile) {
  return {LoadTile<T, kElements>(shared, 2 * tile),
          LoadTile<T, kElements>(shared, 2 * tile + 1)};
}

// Reads pairs of e and x; sums them.
template <typename T, int kElements>
class Reducer {
 public:
  using A = Accumulator<T>;

  __device__ __forceinline__ Reducer(const BackwardParameters& p,
                                     const SharedMemory& shared,
                                     const Slab<kElements>& slab)
      : slab_(slab),
        gate_(p.tiling, p.buffers, p.buffers.gate, shared, slab),
        p_(p) {
    Clear();
  }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int i = 0; i < kElements; ++i) first_[i] = second_[i] = 0;
  }

  __device__ __forceinline__ Sums Of(int i) const {
    return {first_[i], second_[i]};
  }

  // Loads of one vector, all in flight before any is used.
  template <Reuse kReuse>
  __device__ __forceinline__ void Load(int tile,
                                       GradientPair<T, kElements>* pair,
                                       Saved<T, kElements>* saved) const {
    const int64_t offset = slab_.Offset(tile);
    pair->e = LoadVector<kReuse, kElements>(
        static_cast<const T*>(p_.buffers.dy) + offset);
    pair->x = LoadVector<kReuse, kElements>(
        static_cast<const T*>(p_.buffers.x) + offset);
    gate_.template Load<kReuse>(offset, saved);
  }

  // Gates dy in place, writes dz, adds.
  template <Reuse kReuse>
  __device__ __forceinline__ void Accumulate(int tile,
                                             GradientPair<T, kElements>* pair,
                                             const Saved<T, kElements>& saved) {
    gate_.Apply(pair->x, saved, &pair->e);
    if (p_.dz != nullptr) {
      StoreVector<kReuse>(static_cast<T*>(p_.dz) + slab_.Offset(tile), pair->e);
    }
    const auto mean = gate_.Mean();
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const A e = pair->e.Get(i);
      first_[i] += e;
      second_[i] =
          MultiplyAdd(e, Subtract(pair->x.Get(i), mean[i]), second_[i]);
    }
  }

 private:
  const Slab<kElements>& slab_;
  Gating<T, kElements> gate_;
  const BackwardParameters& p_;
  A first_[kElements];
  A second_[kElements];
};

// The constants of the sums: mean, and what gate kX recomputes y from. All
// threads of the block call it, and may use the constants afterwards.
template <typename A, int kElements>
__device__ __forceinline__ void SetReduceConstants(const BackwardParameters& p,
                                                   const SharedMemory& shared,
                                                   const Slab<kElements>& slab,
                                                   bool whole) {
  const int column = static_cast<int>(threadIdx.x);
  __syncthreads();  // the constants of the slab before are still in use
  if (slab.HasConstant(column)) {
    const int64_t channels = p.tiling.shape.channels;
    const auto at = [&](const VectorOperand& vector, A otherwise) {
      return ElementOr<A>(vector, channels, slab.group(), slab.channel(column),
                          otherwise);
    };
    shared.Constant<A>(kGateMean)[column] = at(p.operands.mean, A{0});
    shared.Constant<A>(kGateMultiplier)[column] =
        whole ? Multiplier(at(p.operands.scale, A{1}), at(p.operands.var, A{0}),
                           p.operands.epsilon)
              : at(p.a, A{0});
    shared.Constant<A>(kGateBias)[column] = at(p.operands.bias, A{0});
  }
  __syncthreads();
}

// Sums of the block's share; keeps the last tiles in shared memory.
template <typename T, int kElements>
__device__ __forceinline__ void SumGradients(const BackwardParameters& p,
                                             const SharedMemory& shared,
                                             const Slab<kElements>& slab) {
  constexpr int kBatch = kBatchOf<T, kElements, 2>;
  const int tiles = slab.tiles();
  const TilePlacement placement(tiles, /*held=*/0, p.tiling.shared_tiles);
  if (static_cast<int>(threadIdx.x) < p.tiling.columns) {
    shared.block[threadIdx.x] = {0, 0};
  }
  Reducer<T, kElements> reducer(p, shared, slab);

  int t = 0;
  do {
    const int flush_end = min(t + kFlushTiles, tiles);
    for (; t < flush_end; t += kBatch) {
      GradientPair<T, kElements> batch[kBatch];
      Saved<T, kElements> saved[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (t + k < tiles && slab.Has(t + k)) {
          reducer.template Load<Reuse::kSoon>(t + k, &batch[k], &saved[k]);
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (t + k < tiles && slab.Has(t + k)) {
          reducer.template Accumulate<Reuse::kSoon>(t + k, &batch[k], saved[k]);
          if (t + k >= placement.shared_begin) {
            StorePair(shared, t + k - placement.shared_begin, batch[k]);
          }
        }
      }
    }
    AddToBlock<kElements>(p.tiling, shared,
                          [&](int i) { return reducer.Of(i); });
    reducer.Clear();
  } while (t < tiles);
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_GRADIENT_SUMS_CUH_
