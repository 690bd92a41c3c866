// Sums of x and of its squares, both taken around an origin.

#ifndef JAX_BNAR_CUDA_DEVICE_STATISTICS_CUH_
#define JAX_BNAR_CUDA_DEVICE_STATISTICS_CUH_

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/team_sums.cuh"
#include "cuda/device/tile_stream.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// The constants of both passes of forward, which lie in shared memory.
enum ForwardConstant { kMean, kMultiplier, kBias, kOrigin };

__device__ __forceinline__ bool IsFinite(float v) { return v - v == 0; }
__device__ __forceinline__ bool IsFinite(double v) { return v - v == 0; }

// Returns an element of a channel, or 0 if that element is not finite, because
// it would make every sum NaN.
template <typename T, typename SlabOf>
__device__ __forceinline__ Accumulator<T> FiniteElement(const T* x,
                                                        const SlabOf& slab,
                                                        int column,
                                                        int64_t element) {
  using Bits = typename Element<T>::Bits;
  const auto value =
      Element<T>::Decode(*(reinterpret_cast<const Bits*>(x) +
                           slab.OffsetInChannel(column, element)));
  return IsFinite(value) ? value : 0;
}

// Returns the origin that the sums of a channel are taken around. Sums in
// double of narrower elements have digits to spare, so any element will do.
// Sums of doubles have none: var loses as many digits as ((origin - mean) /
// std)^2 has, and that is the number of elements if the origin is the only
// outlier. For doubles, the origin is therefore the one of 16 elements that is
// nearest to their mean without the smallest and the largest. It is an element
// rather than that mean, so that a constant channel has variance 0.
template <typename T, typename SlabOf>
__device__ __forceinline__ Accumulator<T> OriginOf(const T* x,
                                                   const SlabOf& slab,
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

// Returns what a thread subtracts from its elements before it adds them in
// float. For each element of the vector, it is the median of the thread's first
// three, so that a single outlier among them is not chosen: n squares that were
// taken around an outlier and added in float are off by n^2 / 2^25 of one
// square. A median that is not finite would make every sum NaN, so 0 replaces
// it.
template <typename T, int kElements>
__device__ __forceinline__ Values<Accumulator<T>, kElements> ShiftOf(
    const Vector<T, kElements>& first, const Vector<T, kElements>& second,
    const Vector<T, kElements>& third) {
  using A = Accumulator<T>;
  const auto as = first.Get(), bs = second.Get(), cs = third.Get();
  Values<A, kElements> shift;
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const A a = as[i], b = bs[i], c = cs[i];
    const A low = a < b ? a : b, high = a < b ? b : a;
    const A middle = c < low ? low : c > high ? high : c;
    shift[i] = IsFinite(middle) ? middle : A{0};
  }
  return shift;
}

// One thread's sums around a shift. In float, the shift is that of ShiftOf,
// which is near the mean where |mean| >> std. In double, it is the origin.
template <typename T, int kElements>
struct ShiftedSums {
  using A = Accumulator<T>;

  __device__ __forceinline__ void Clear() {
    count = 0;
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i] = squares[i] = 0;
  }

  __device__ __forceinline__ void Accumulate(const Vector<T, kElements>& x) {
    const Values<A, kElements> values = x.Get();
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const A d = Subtract(values[i], shift[i]);
      sum[i] += d;
      squares[i] = MultiplyAdd(d, d, squares[i]);
    }
  }

  // Returns the sums of element i around `origin` instead of the shift. In
  // double, this loses nothing of a float's precision: the origin is an element
  // too, so (origin - mean)^2 <= n * var.
  __device__ __forceinline__ Sums Around(int i, A origin) const {
    const double d = static_cast<double>(shift[i]) - origin;
    const double n = count;
    return {sum[i] + n * d, squares[i] + d * (2 * sum[i] + n * d)};
  }

  Values<A, kElements> shift;
  Values<A, kElements> sum;
  Values<A, kElements> squares;
  int count;  // The number of vectors in the sums.
};

// Computes the sums of the block's share. With kKeep, tiles stay in shared
// memory: vectors come there by the copies of `stream`, which have been
// started; single elements are loaded and stored here. All threads of the block
// call it.
template <typename T, int kElements, bool kKeep, typename SlabOf,
          typename Stream = NoStream>
__device__ __forceinline__ void SumStatistics(const Tiling& tiling,
                                              const SharedMemory& shared,
                                              const SlabOf& slab, const T* x,
                                              Stream* stream = nullptr) {
  using A = Accumulator<T>;
  using V = Vector<T, kElements>;
  constexpr bool kCopied = kKeep && kCopiesTiles<kElements>;
  // Where channels are first, finding a vector takes registers, and where they
  // are last, adding the sums of the block's columns.
  constexpr int kMost = kElements == 8 && (SlabOf::kPlanes || !kKeep) ? 3 : 8;
  constexpr int kDepth =
      kInFlight<T, kElements, 1> < kMost ? kInFlight<T, kElements, 1> : kMost;
  const int thread = static_cast<int>(threadIdx.x);
  const bool has_column = slab.HasColumn(thread);
  // This load is in flight while those of the shift are.
  A origin = 0;
  if (has_column) origin = OriginOf(x, slab, thread, tiling.shape.count());
  V first[3]{};
  if constexpr (kCopied) {
    stream->WaitForFirst(3);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (slab.Has(i)) first[i] = stream->Peek(i);
    }
  } else if constexpr (!std::is_same_v<T, double>) {
    auto ahead = slab.At(0);
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (slab.Has(i)) {
        first[i] = LoadVectorAt<Reuse::kSoon, kElements>(x, ahead);
      }
      ahead.Advance();
    }
  }
  if (thread < tiling.columns) shared.sums[thread] = {0, 0};
  if (has_column) shared.Constant<A>(kOrigin)[thread] = origin;
  __syncthreads();

  ShiftedSums<T, kElements> sums;
  if constexpr (std::is_same_v<T, double>) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int column = slab.Column(i);
      sums.shift[i] =
          slab.HasColumn(column) ? shared.Constant<A>(kOrigin)[column] : A{0};
    }
  } else {
    sums.shift = slab.Has(2) ? ShiftOf(first[0], first[1], first[2])
                             : ShiftOf(first[0], first[0], first[0]);
    if constexpr (SlabOf::kPlanes) {
      // One shift serves all elements, because all are of the same channel.
#pragma unroll
      for (int i = 1; i < kElements; ++i) sums.shift[i] = sums.shift[0];
    }
  }
  sums.Clear();
  const auto flush = [&] {
    AddToBlock<kElements>(tiling, shared, slab, [&](int i) {
      const int column = slab.Column(i);
      return slab.HasColumn(column)
                 ? sums.Around(i, shared.Constant<A>(kOrigin)[column])
                 : Sums{0, 0};
    });
    sums.Clear();
  };
  if constexpr (kCopied) {
    auto pass = stream->First(slab);
    ForEachPart(
        slab.tiles(),
        [&](int begin, int end) {
          const int count = slab.Count(begin, end);
          sums.count += count;
          pass.template ForEach<Stream::kStageTiles, Nothing>(
              count, [](Nothing*) {},
              [&](const auto& tile, Nothing, auto) {
                sums.Accumulate(tile.Get(0));
              });
        },
        flush);
  } else {
    auto in = slab.At(0);
    const int kept = kKeep ? tiling.shared_tiles : 0;
    ForEachSegment(
        kept, slab.tiles(),
        [&](int begin, int end) {
          const int count = slab.Count(begin, end);
          sums.count += count;
          if constexpr (kKeep) {
            const auto& ring = stream->ring();
            int slot = ring.At(begin);
            ForEachTile<kDepth, V>(
                count,
                [&](V* v) {
                  *v = LoadVectorAt<Reuse::kNever, kElements>(x, in);
                  in.Advance();
                },
                [&](const V& v) {
                  ring.Set(slot, 0, v);
                  slot = ring.Next(slot);
                  sums.Accumulate(v);
                });
          }
        },
        [&](int begin, int end) {
          const int count = slab.Count(begin, end);
          sums.count += count;
          ForEachTile<kDepth, V>(
              count,
              [&](V* v) {
                *v = LoadVectorAt<Reuse::kSoon, kElements>(x, in);
                in.Advance();
              },
              [&](const V& v) { sums.Accumulate(v); });
        },
        flush);
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_STATISTICS_CUH_
