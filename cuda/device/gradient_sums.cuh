// Sums of e and of e * (x - mean), where e is dy times the derivative of the
// activation: for ReLU, dy if it let the element pass, else 0.

#ifndef JAX_BNAR_CUDA_DEVICE_GRADIENT_SUMS_CUH_
#define JAX_BNAR_CUDA_DEVICE_GRADIENT_SUMS_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/gate.cuh"
#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/team_sums.cuh"
#include "cuda/device/tile_stream.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"
#include "native/numerics.h"

namespace jax_bnar {
namespace cuda {

// One thread's sums.
template <typename T, int kElements>
class GradientSums {
 public:
  using A = Accumulator<T>;

  template <bool kAgain = false, typename SlabOf>
  __device__ __forceinline__ void LoadMean(const SharedMemory& shared,
                                           const SlabOf& slab) {
    mean_ = LoadConstants<A, kElements, kAgain>(shared, kGateMean, slab);
  }

  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int i = 0; i < kElements; ++i) first_[i] = second_[i] = 0;
  }

  __device__ __forceinline__ void Accumulate(const Values<A, kElements>& es,
                                             const Vector<T, kElements>& x) {
    const Values<A, kElements> xs = x.Get();
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      first_[i] += es[i];
      second_[i] = MultiplyAdd(es[i], Subtract(xs[i], mean_[i]), second_[i]);
    }
  }

  __device__ __forceinline__ Sums Of(int i) const {
    return {first_[i], second_[i]};
  }

 private:
  Values<A, kElements> mean_;
  Values<A, kElements> first_;
  Values<A, kElements> second_;
};

// Sets the constants of the sums: mean, and those from which gates kX and kZ
// recompute y. Where nothing needs the multiplier, there may be no var. All
// threads of the block call it, and may use the constants afterwards.
template <typename A, typename SlabOf>
__device__ __forceinline__ void SetReduceConstants(const BackwardParameters& p,
                                                   const SharedMemory& shared,
                                                   const SlabOf& slab) {
  const int column = static_cast<int>(threadIdx.x);
  __syncthreads();  // The constants of the previous slab are still in use.
  if (slab.HasColumn(column)) {
    const int64_t channels = p.tiling.shape.channels;
    const auto at = [&](const VectorOperand& vector, A otherwise) {
      return ElementOr<A>(vector, channels, slab.group(), slab.channel(column),
                          otherwise);
    };
    shared.Constant<A>(kGateMean)[column] = at(p.operands.mean, A{0});
    shared.Constant<A>(kGateMultiplier)[column] =
        p.operands.var.data == nullptr
            ? A{0}
            : Multiplier(at(p.operands.scale, A{1}), at(p.operands.var, A{0}),
                         p.operands.epsilon);
    shared.Constant<A>(kGateBias)[column] = at(p.operands.bias, A{0});
  }
  __syncthreads();
}

// The sums, with everything fixed that a loop would otherwise have to test.
template <typename T, int kElements, bool kKeep, typename Form, typename SlabOf,
          typename Stream>
__device__ __forceinline__ void SumGradientsAs(const BackwardParameters& p,
                                               const SharedMemory& shared,
                                               const SlabOf& slab,
                                               Stream* stream) {
  constexpr Gate kGate = Form::kGate;
  constexpr bool kStoreDz = Form::kStoreDz;
  using Item = GradientItem<T, kElements, kGate>;
  constexpr int kDepth = kInFlight<T, kElements, kGradientArrays<kGate>>;
  // In float32, the other way would spill a register where channels are first,
  // for compute capability 9.0.
  constexpr Copies kCopies = SlabOf::kPlanes && sizeof(T) == 4
                                 ? Copies::kMany
                                 : kCopiesOfGating<kGate, Form::kCurve>;
  const GradientLoader<T, kElements, kGate> loader(p.buffers.dy, p.buffers);
  const Gating<T, kElements, kGate, Form::kCurve> gating(p.buffers, shared,
                                                         slab);
  GradientSums<T, kElements> sums;
  sums.LoadMean(shared, slab);
  sums.Clear();
  T* dz = static_cast<T*>(p.dz);
  auto in = loader.template At<1>(slab, 0);
  auto out = slab.At(0);

  // `reuse` says whether the second pass reads dz.
  const auto accumulate = [&](auto reuse, Item* item) {
    const auto e = gating.Apply(item);
    if constexpr (kStoreDz) {
      StoreVectorAt<decltype(reuse)::value>(dz, out, item->e);
      out.Advance();
    }
    sums.Accumulate(e, item->x);
  };
  const std::integral_constant<Reuse, Reuse::kNever> never;
  const std::integral_constant<Reuse, Reuse::kSoon> soon;
  const auto flush = [&] {
    AddToBlock<kElements>(p.tiling, shared, slab,
                          [&](int i) { return sums.Of(i); });
    // Reloaded, the mean takes up no registers while sums are added. Gates kX
    // and kZ have it in the same registers.
    if (kShortOfRegisters || (kGate != Gate::kX && kGate != Gate::kZ)) {
      sums.LoadMean(shared, slab);
    }
    sums.Clear();
  };
  // Where there is a dz, the second pass reads it instead of dy.
  constexpr Reuse kReuseE = kStoreDz ? Reuse::kNever : Reuse::kSoon;
  if constexpr (kKeep && kCopiesTiles<kElements>) {
    using Ahead = Saved<T, kElements, kGate>;
    auto pass = stream->First(slab);
    ForEachPart(
        slab.tiles(),
        [&](int begin, int end) {
          pass.template ForEach<
              kSavedInFlight<T, kElements, kGate, Form::kCurve, SlabOf>, Ahead,
              kCopies>(
              slab.Count(begin, end),
              [&](Ahead* saved) {
                loader.template LoadSaved<kReuseE>(in, saved);
                in.Advance();
              },
              [&](const auto& tile, const Ahead& saved, auto reuse) {
                Item item{tile.Get(0), tile.Get(1), saved};
                accumulate(reuse, &item);
                // If the tile stays, its slot now holds e instead of dy.
                if constexpr (kGate != Gate::kNone &&
                              decltype(reuse)::value == Reuse::kNever) {
                  tile.Set(0, item.e);
                }
              });
        },
        flush);
  } else {
    const int kept = kKeep ? p.tiling.shared_tiles : 0;
    ForEachSegment(
        kept, slab.tiles(),
        [&](int begin, int end) {
          if constexpr (kKeep) {
            const auto& ring = stream->ring();
            int slot = ring.At(begin);
            ForEachTile<kDepth, Item, kCopies>(
                slab.Count(begin, end),
                [&](Item* item) {
                  loader.template Load<Reuse::kNever, Reuse::kNever>(in, item);
                  in.Advance();
                },
                [&](Item& item) {
                  accumulate(never, &item);
                  ring.Set(slot, 0, item.e);
                  ring.Set(slot, 1, item.x);
                  slot = ring.Next(slot);
                });
          }
        },
        [&](int begin, int end) {
          ForEachTile<kDepth, Item, kCopies>(
              slab.Count(begin, end),
              [&](Item* item) {
                loader.template Load<kReuseE, Reuse::kSoon>(in, item);
                in.Advance();
              },
              [&](Item& item) { accumulate(soon, &item); });
        },
        flush);
  }
}

// Computes the sums of the block's share. With kKeep, e and x of some tiles
// stay in shared memory, to where `stream` copies dy and x unless threads load
// single elements. `Form` is a BackwardForm, AnyForm or AnyCurve. All threads
// of the block call it.
template <typename T, int kElements, bool kKeep, typename Form, typename SlabOf,
          typename Stream = NoStream>
__device__ __forceinline__ void SumGradients(const BackwardParameters& p,
                                             const SharedMemory& shared,
                                             const SlabOf& slab,
                                             Stream* stream = nullptr) {
  if (static_cast<int>(threadIdx.x) < p.tiling.columns) {
    shared.sums[threadIdx.x] = {0, 0};
  }
  const auto sum = [&](auto form) {
    SumGradientsAs<T, kElements, kKeep, decltype(form)>(p, shared, slab,
                                                        stream);
  };
  if constexpr (std::is_same_v<Form, AnyForm>) {
    WithBackwardForm(p.buffers.gate, p.dz != nullptr, sum);
  } else if constexpr (std::is_same_v<Form, AnyCurve>) {
    WithBackwardCurve(p.buffers.gate, p.dz != nullptr, sum);
  } else {
    sum(Form{});
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_GRADIENT_SUMS_CUH_
