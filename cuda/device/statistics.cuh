// Sums of x and of its squares, each around an origin.

#ifndef JAX_BNAR_CUDA_DEVICE_STATISTICS_CUH_
#define JAX_BNAR_CUDA_DEVICE_STATISTICS_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/slab.cuh"
#include "cuda/device/team_sums.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// Of both passes of forward, in shared memory.
enum ForwardConstant { kMean, kMultiplier, kBias, kOrigin };

__device__ __forceinline__ bool IsFinite(float v) { return v - v == 0; }
__device__ __forceinline__ bool IsFinite(double v) { return v - v == 0; }

// An element of a channel, or 0 instead of one that would make every sum NaN.
template <typename T, int kElements>
__device__ __forceinline__ Accumulator<T> FiniteElement(
    const T* x, const Slab<kElements>& slab, int column, int64_t element) {
  using Bits = typename Element<T>::Bits;
  const auto value =
      Element<T>::Decode(*(reinterpret_cast<const Bits*>(x) +
                           slab.OffsetInChannel(column, element)));
  return IsFinite(value) ? value : 0;
}

// What the sums of a channel are taken around. Sums in double of narrower
// elements have digits to spare, and any element will do. Those of doubles have
// none: var loses the digits of ((origin - mean) / std)^2, which is the number
// of elements where the origin is the outlier. So there it is the one of 16
// elements that is nearest to the mean of these, without their smallest and
// their largest. An element, not that mean: a constant channel has variance 0.
template <typename T, int kElements>
__device__ __forceinline__ Accumulator<T> OriginOf(const T* x,
                                                   const Slab<kElements>& slab,
                                                   int column, int64_t count) {
  using A = Accumulator<T>;
  A origin = FiniteElement(x, slab, column, 0);
  if constexpr (std::is_same_v<T, double>) {
    const int64_t samples = count < 16 ? count : 16;
    if (samples < 3) return origin;
    A sum = 0, smallest = origin, largest = origin;
    for (int64_t i = 0; i < samples; ++i) {
      const A value = FiniteElement(x, slab, column, i * count / samples);
      sum += value;
      smallest = value < smallest ? value : smallest;
      largest = value > largest ? value : largest;
    }
    const A centre = (sum - smallest - largest) / (samples - 2);
    for (int64_t i = 0; i < samples; ++i) {
      const A value = FiniteElement(x, slab, column, i * count / samples);
      if (fabs(value - centre) < fabs(origin - centre)) origin = value;
    }
  }
  return origin;
}

// Each the middle one of the first three of a thread, so that one outlier among
// them is not it: n squares of an outlier added in float are off by n^2 / 2^25
// of one.
template <typename T, int kElements>
__device__ __forceinline__ Vector<T, kElements> LoadShift(
    const T* x, const Slab<kElements>& slab) {
  using A = Accumulator<T>;
  Vector<T, kElements> first[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    first[k] = LoadVector<Reuse::kSoon, kElements>(
        x + slab.Offset(slab.Has(2) ? k : 0));
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const A a = first[0].Get(i), b = first[1].Get(i), c = first[2].Get(i);
    const A low = a < b ? a : b, high = a < b ? b : a;
    first[0].Set(i, c < low ? low : c > high ? high : c);
  }
  return first[0];
}

// One thread's sums around a shift. In float that is LoadShift's: where |mean|
// >> std it is near the mean. In double it is the origin.
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

  __device__ __forceinline__ void Accumulate(const Vector<T, kElements>& x) {
    ++count;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const A d = Subtract(x.Get(i), shift.Get(i));
      sum[i] += d;
      squares[i] = MultiplyAdd(d, d, squares[i]);
    }
  }

  // Of element i, around `origin` instead. In double nothing of a float is
  // lost: origin is an element too, so (origin - mean)^2 <= n * var.
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
  const TilePlacement placement(slab.tiles(), kHeld, tiling.shared_tiles);
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < tiling.columns) shared.block[thread] = {0, 0};
  if (slab.HasColumn(thread)) {
    shared.Constant<A>(kOrigin)[thread] =
        OriginOf(x, slab, thread, tiling.shape.count());
  }
  __syncthreads();
  ShiftedSums<T, kElements> sums;
  Vector<T, kElements> shift{};
  if constexpr (std::is_same_v<T, double>) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int column = slab.Column(i);
      if (slab.HasColumn(column)) {
        shift.Set(i, shared.Constant<A>(kOrigin)[column]);
      }
    }
  } else if (slab.Has(0)) {
    shift = LoadShift<T, kElements>(x, slab);
  }
  sums.Start(shift);

  int t = 0;
  bool more;
  do {
    const int flush_end = min(t + kFlushTiles, placement.held_begin);
    for (; t < flush_end; t += kBatch) {
      Vector<T, kElements> batch[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (t + k < placement.held_begin && slab.Has(t + k)) {
          batch[k] =
              LoadVector<Reuse::kSoon, kElements>(x + slab.Offset(t + k));
        }
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (t + k < placement.held_begin && slab.Has(t + k)) {
          if (t + k >= placement.shared_begin) {
            StoreTile(shared, t + k - placement.shared_begin, batch[k]);
          }
          sums.Accumulate(batch[k]);
        }
      }
    }
    more = t < placement.held_begin;
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
          if (tile >= 0 && slab.Has(tile)) sums.Accumulate(held.vectors[i]);
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

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_STATISTICS_CUH_
