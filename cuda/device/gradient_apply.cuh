// The elementwise pass of backward.

#ifndef JAX_BNAR_CUDA_DEVICE_GRADIENT_APPLY_CUH_
#define JAX_BNAR_CUDA_DEVICE_GRADIENT_APPLY_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/gate.cuh"
#include "cuda/device/gradient_sums.cuh"
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

// Loads what the constants of one column are computed from, to where these will
// be.
template <typename A, typename SlabOf>
__device__ __forceinline__ void LoadVarAndScale(const BackwardParameters& p,
                                                const SharedMemory& shared,
                                                const SlabOf& slab,
                                                int column) {
  const auto at = [&](const VectorOperand& vector, A otherwise) {
    return ElementOr<A>(vector, p.tiling.shape.channels, slab.group(),
                        slab.channel(column), otherwise);
  };
  if (slab.HasColumn(column)) {
    shared.Constant<A>(kCentredMultiplier)[column] = at(p.operands.var, A{0});
    shared.Constant<A>(kConstantTerm)[column] = at(p.operands.scale, A{1});
  }
}

// Computes b and k from the team's sums and, if `store`, writes the gradients
// of scale and bias. LoadVarAndScale has been called. The cotangents of mean
// and var are loaded here, because few programs have any.
template <typename A, typename SlabOf>
__device__ __forceinline__ void SetApplyConstants(const BackwardParameters& p,
                                                  const SharedMemory& shared,
                                                  const SlabOf& slab,
                                                  bool store) {
  const int column = static_cast<int>(threadIdx.x);
  if (slab.HasColumn(column)) {
    const Shape& shape = p.tiling.shape;
    const int64_t channel = slab.channel(column);
    const auto at = [&](const VectorOperand& vector, A otherwise) {
      return ElementOr<A>(vector, shape.channels, slab.group(), channel,
                          otherwise);
    };
    const Sums sums = shared.sums[column];
    A* b = shared.Constant<A>(kCentredMultiplier) + column;
    A* k = shared.Constant<A>(kConstantTerm) + column;
    const auto of = BackwardChannelOf<A>(
        *b, *k, at(p.operands.dmean, A{0}), at(p.operands.dvar, A{0}),
        p.operands.epsilon, sums.first, sums.second,
        static_cast<double>(shape.count()));
    *b = of.b;
    *k = of.k;
    if (store) {
      const int64_t i = slab.group() * shape.channels + channel;
      static_cast<A*>(p.first)[i] = of.dbias;
      static_cast<A*>(p.second)[i] = of.dscale;
    }
  }
  __syncthreads();
}

// Computes dx of a vector from constants that the thread keeps in registers,
// with kAgain for one vector.
template <typename T, int kElements, bool kAgain = false>
class Applier {
 public:
  using A = Accumulator<T>;
  using V = Vector<T, kElements>;

  template <typename SlabOf>
  __device__ __forceinline__ Applier(const SharedMemory& shared,
                                     const SlabOf& slab) {
    mean_ = LoadConstants<A, kElements, kAgain>(shared, kGateMean, slab);
    a_ = LoadConstants<A, kElements, kAgain>(shared, kGateMultiplier, slab);
    b_ = LoadConstants<A, kElements, kAgain>(shared, kCentredMultiplier, slab);
    k_ = LoadConstants<A, kElements, kAgain>(shared, kConstantTerm, slab);
  }

  __device__ __forceinline__ V Of(const V& e, const V& x) const {
    const Values<A, kElements> es = e.Get(), xs = x.Get();
    Values<A, kElements> values;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const A centred = Subtract(xs[i], mean_[i]);
      values[i] = MultiplyAdd(a_[i], es[i], MultiplyAdd(b_[i], centred, k_[i]));
    }
    V dx;
    dx.Set(values);
    return dx;
  }

 private:
  Values<A, kElements> mean_;
  Values<A, kElements> a_;
  Values<A, kElements> b_;
  Values<A, kElements> k_;
};

// The elementwise pass on the tiles that `stream` copies, the last one first.
// Those that were kept are e and x. Of the others, dz is copied again if the
// sums wrote it, and otherwise dy, with what was saved for the gate. A thread
// copies only what it has stored of dz itself. Its stores go through to L2,
// from where cp.async.cg reads. PTX does not spell out that such a copy sees
// what the same thread has stored before; if a device ever shows that it does
// not, one OrderMemory() for each slab, after the first pass, is enough.
template <typename T, int kElements, typename Form, typename SlabOf,
          typename Stream>
__device__ __forceinline__ void ApplyCopiedTiles(const BackwardParameters& p,
                                                 const SharedMemory& shared,
                                                 const SlabOf& slab,
                                                 Stream* stream) {
  using V = typename Stream::V;
  constexpr Gate kGate = Form::kStoreDz ? Gate::kNone : Form::kGate;
  using Ahead = Saved<T, kElements, kGate>;
  const Applier<T, kElements> applier(shared, slab);
  T* dx = static_cast<T*>(p.dx);
  const void* dy = Form::kStoreDz ? p.dz : p.buffers.dy;
  const int count = slab.Count(0, slab.tiles());
  auto out = slab.template At<-1>(count - 1);
  const auto store = [&](const V& e, const V& x) {
    StoreVectorAt<Reuse::kNever>(dx, out, applier.Of(e, x));
    out.Advance();
  };
  const auto store_kept = [&](const auto& tile, Nothing) {
    store(tile.Get(0), tile.Get(1));
  };
  const auto nothing = [](Nothing*) {};
  constexpr int kDepth = Stream::kStageTiles;
  const SlabOf again = slab.Again();
  auto pass = stream->Second(again, count, {{dy, p.buffers.x}});
  if (again.tiles() <= stream->shared_tiles()) {
    pass.template ForEachKept<kDepth, Nothing>(count, nothing, store_kept);
    return;
  }
  if constexpr (kGate == Gate::kNone) {
    pass.template ForEach</*kCopied=*/true, kDepth, Nothing>(count, nothing,
                                                             store_kept);
  } else {
    const int kept = min(count, pass.kept());
    pass.template ForEach</*kCopied=*/false, kDepth, Nothing>(kept, nothing,
                                                              store_kept);
    const GradientLoader<T, kElements, kGate> loader(dy, p.buffers);
    const Gating<T, kElements, kGate, Form::kCurve> gating(p.buffers, shared,
                                                           slab);
    auto in = loader.template At<-1>(again, count - 1 - kept);
    pass.template ForEach<
        /*kCopied=*/true,
        kSavedInFlight<T, kElements, kGate, Form::kCurve, SlabOf>, Ahead,
        kCopiesOfGating<kGate, Form::kCurve>>(
        count - kept,
        [&](Ahead* saved) {
          loader.template LoadSaved<Reuse::kNever>(in, saved);
          in.Advance();
        },
        [&](const auto& tile, const Ahead& saved) {
          GradientItem<T, kElements, kGate> item{tile.Get(0), tile.Get(1),
                                                 saved};
          gating.Apply(&item);
          store(item.e, item.x);
        });
  }
}

// The elementwise pass of tiles whose loads go to registers: first those that
// L2 may still hold, the last one first, then those in the slots of `stream`.
template <typename T, int kElements, bool kKeep, typename Form, typename SlabOf,
          typename Stream>
__device__ __forceinline__ void ApplyLoadedTiles(const BackwardParameters& p,
                                                 const SharedMemory& shared,
                                                 const SlabOf& slab,
                                                 Stream* stream) {
  using V = Vector<T, kElements>;
  const Applier<T, kElements> applier(shared, slab);
  const int shared_end = kKeep ? min(p.tiling.shared_tiles, slab.tiles()) : 0;
  T* dx = static_cast<T*>(p.dx);
  const auto store = [&](auto& out, const V& e, const V& x) {
    StoreVectorAt<Reuse::kNever>(dx, out, applier.Of(e, x));
    out.Advance();
  };
  if (shared_end < slab.tiles()) {
    const int count = slab.Count(shared_end, slab.tiles());
    const int last = shared_end + count - 1;
    const auto apply = [&](auto form) {
      using F = decltype(form);
      constexpr Gate kGate = F::kStoreDz ? Gate::kNone : F::kGate;
      using Item = GradientItem<T, kElements, kGate>;
      const GradientLoader<T, kElements, kGate> loader(
          F::kStoreDz ? p.dz : p.buffers.dy, p.buffers);
      constexpr bool kCurve = F::kCurve && kGate != Gate::kNone;
      const Gating<T, kElements, kGate, kCurve> gating(p.buffers, shared, slab);
      auto in = loader.template At<-1>(slab, last);
      auto out = slab.template At<-1>(last);
      ForEachTile<kInFlight<T, kElements, kGradientArrays<kGate>>, Item,
                  kCopiesOfGating<kGate, kCurve>>(
          count,
          [&](Item* item) {
            loader.template Load<Reuse::kNever, Reuse::kNever>(in, item);
            in.Advance();
          },
          [&](Item& item) {
            gating.Apply(&item);
            store(out, item.e, item.x);
          });
    };
    if constexpr (std::is_same_v<Form, AnyForm>) {
      WithBackwardForm(p.buffers.gate, kKeep && p.dz != nullptr, apply);
    } else if constexpr (std::is_same_v<Form, AnyCurve>) {
      WithBackwardCurve(p.buffers.gate, /*store_dz=*/false, apply);
    } else {
      apply(Form{});
    }
  }
  if constexpr (kKeep) {
    struct Pair {
      V e;
      V x;
    };
    const SlabOf again = slab.Again();
    auto out = again.At(0);
    const auto& ring = stream->ring();
    int slot = ring.At(0);
    // A small depth is enough, because shared memory answers in a few dozen
    // cycles.
    ForEachTile<sizeof(T) == 2 ? 2 : 1, Pair>(
        again.Count(0, shared_end),
        [&](Pair* pair) {
          *pair = {ring.Get(slot, 0), ring.Get(slot, 1)};
          slot = ring.Next(slot);
        },
        [&](const Pair& pair) { store(out, pair.e, pair.x); });
  }
}

// The elementwise pass. For tiles that were not kept, dz is read if the sums
// wrote it; otherwise dy and what was saved for the gate are read again.
template <typename T, int kElements, bool kKeep, typename Form, typename SlabOf,
          typename Stream = NoStream>
__device__ __forceinline__ void ApplyTiles(const BackwardParameters& p,
                                           const SharedMemory& shared,
                                           const SlabOf& slab,
                                           Stream* stream = nullptr) {
  if constexpr (kKeep && kCopiesTiles<kElements>) {
    ApplyCopiedTiles<T, kElements, Form>(p, shared, slab, stream);
  } else {
    ApplyLoadedTiles<T, kElements, kKeep, Form>(p, shared, slab, stream);
  }
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_GRADIENT_APPLY_CUH_
