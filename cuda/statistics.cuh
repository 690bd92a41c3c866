// Sums of x and of its squares, each around an origin.

#ifndef JAX_BNAR_CUDA_STATISTICS_CUH_
#define JAX_BNAR_CUDA_STATISTICS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/intrinsics.cuh"
#include "cuda/parameters.h"
#include "cuda/shared_memory.cuh"
#include "cuda/slab.cuh"
#include "cuda/team_sums.cuh"
#include "cuda/tiles.cuh"
#include "cuda/vector.cuh"

namespace jax_bnar {
namespace gpu {

// Of both passes of forward, in shared memory.
enum ForwardConstant { kMean, kMultiplier, kBias, kOrigin };

__device__ __forceinline__ bool IsFinite(float v) { return v - v == 0; }
__device__ __forceinline__ bool IsFinite(double v) { return v - v == 0; }

// The first element of a channel; 0 for one that would make every sum NaN.
template <typename T>
__device__ __forceinline__ Accumulator<T> OriginAt(const T* x, int64_t offset) {
  using Bits = typename Element<T>::Bits;
  const auto value =
      Element<T>::Decode(*(reinterpret_cast<const Bits*>(x) + offset));
  return IsFinite(value) ? value : 0;
}

// One thread's sums around a shift of its own, its first elements: where
// |mean| >> std they are near the mean, and an outlier among them harms the
// sums of this thread alone, no more than its own square does anyway.
template <typename T, int kElements>
struct ShiftedSums {
  using A = Accumulator<T>;

  __device__ __forceinline__ void Start(const Vector<T, kElements>& first) {
    shift = first;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (!IsFinite(first.Get(i))) shift.Set(i, A{0});
    }
    Clear();
  }

  __device__ __forceinline__ void Clear() {
    count = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = squares[i] = 0;
  }

  __device__ __forceinline__ void Take(const Vector<T, kElements>& x) {
    ++count;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const A d = Subtract(x.Get(i), shift.Get(i));
      sum[i] += d;
      squares[i] = MultiplyAdd(d, d, squares[i]);
    }
  }

  // Of element i, around `origin` instead. In double nothing is lost: origin is
  // an element too, so (origin - mean)^2 <= n * var.
  __device__ __forceinline__ Sums Around(int i, A origin) const {
    const double d = static_cast<double>(shift.Get(i)) - origin;
    const double n = count;
    return {sum[i] + n * d, squares[i] + d * (2 * sum[i] + n * d)};
  }

  Vector<T, kElements> shift;
  A sum[kElements];
  A squares[kElements];
  int count;
};

// Sums of the block's share; keeps the last tiles in `held` and shared memory.
template <typename T, int kElements, int kHeld>
__device__ __forceinline__ void SumStatistics(const Tiling& tiling,
                                              const SharedMemory& shared,
                                              const Slab<kElements>& slab,
                                              const T* x,
                                              Held<T, kElements, kHeld>& held) {
  using A = Accumulator<T>;
  constexpr int kBatch = kBatchOf<T, kElements, 4>;
  const Residence residence(slab.tiles(), kHeld, tiling.shared_tiles);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < tiling.columns) shared.block[thread] = {0, 0};
  if (slab.HasColumn(thread)) {
    shared.Constant<A>(kOrigin)[thread] = OriginAt(x, slab.Origin(thread));
  }
  __syncthreads();
  ShiftedSums<T, kElements> sums;
  Vector<T, kElements> first{};
  if (slab.Has(0)) {
    first = LoadVector<Reuse::kSoon, kElements>(x + slab.Offset(0));
  }
  sums.Start(first);

  int t = 0;
  bool more;
  do {
    const int chapter_end = min(t + kChapter, residence.held_begin);
    for (; t < chapter_end; t += kBatch) {
      Vector<T, kElements> batch[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (t + k < residence.held_begin && slab.Has(t + k)) {
          batch[k] =
              LoadVector<Reuse::kSoon, kElements>(x + slab.Offset(t + k));
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (t + k < residence.held_begin && slab.Has(t + k)) {
          if (t + k >= residence.shared_begin) {
            StoreTile(shared, t + k - residence.shared_begin, batch[k]);
          }
          sums.Take(batch[k]);
        }
      }
    }
    more = t < residence.held_begin;
    if constexpr (kHeld > 0) {
      if (!more) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const int tile = slab.tiles() - kHeld + i;
          if (tile >= 0 && slab.Has(tile)) {
            held.vectors[i] =
                LoadVector<Reuse::kNever, kElements>(x + slab.Offset(tile));
          }
        }
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
          const int tile = slab.tiles() - kHeld + i;
          if (tile >= 0 && slab.Has(tile)) sums.Take(held.vectors[i]);
        }
      }
    }
    AddToBlock<kElements>(tiling, shared, [&](int i) {
      const int column = slab.Column(i);
      return slab.HasColumn(column)
                 ? sums.Around(i, shared.Constant<A>(kOrigin)[column])
                 : Sums{0, 0};
    });
    sums.Clear();
  } while (more);
}

}  // namespace gpu
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_STATISTICS_CUH_
