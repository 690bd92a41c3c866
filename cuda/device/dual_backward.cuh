// dx1 = a1 * e + b1 * (x1 - mean1) + k1, and dx2 likewise, with e = dy times
// the derivative of the activation: the sums of both (DualReduceKernel) and
// both gradients (DualApplyKernel). dy, saved, the gate and the activation are
// those of the first parameters; the second ones have x2, its vectors and dx2.

#ifndef JAX_BNAR_CUDA_DEVICE_DUAL_BACKWARD_CUH_
#define JAX_BNAR_CUDA_DEVICE_DUAL_BACKWARD_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/device/backward.cuh"
#include "cuda/device/dual_forward.cuh"
#include "cuda/device/dual_shared_memory.cuh"
#include "cuda/device/forms.cuh"
#include "cuda/device/gate.cuh"
#include "cuda/device/gradient_apply.cuh"
#include "cuda/device/gradient_sums.cuh"
#include "cuda/device/intrinsics.cuh"
#include "cuda/device/shared_memory.cuh"
#include "cuda/device/slab.cuh"
#include "cuda/device/team_sums.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/device/vector.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// What backward reads of a vector: dy, x1 and what was saved, and x2.
template <typename T, int kElements, Gate kGate>
struct DualGradientItem : GradientItem<T, kElements, kGate> {
  Vector<T, kElements> x2;
};

// How many tiles a thread has in flight. Gate kX computes y again; where each
// element has constants of its own, these leave registers for one tile, as the
// loop of another activation than ReLU always does. Below compute capability
// 9.0, gate kY leaves registers for one tile too, because y is kept beside the
// constants of both gradients.
template <Gate kGate>
constexpr bool kLeavesOneTile =
    kGate == Gate::kX || (kGate == Gate::kY && kArchitecture < 900);
template <typename T, int kElements, Gate kGate, bool kCurve, typename SlabOf>
constexpr int kDualDepth =
    kLeavesOneTile<kGate> && kElements > 1 && (kCurve || !SlabOf::kPlanes)
        ? 1
        : kInFlight<T, kElements, kGradientArrays<kGate> + 1>;

// Loads a vector of each array.
template <typename T, int kElements, Gate kGate>
class DualGradientLoader {
 public:
  __device__ __forceinline__ DualGradientLoader(
      const BackwardParameters& first, const BackwardParameters& second)
      : loader_(first.buffers.dy, first.buffers),
        x2_(static_cast<const T*>(second.buffers.x)) {}

  template <int kStep, typename SlabOf>
  __device__ __forceinline__ auto At(const SlabOf& slab, int tile) const {
    return loader_.template At<kStep>(slab, tile);
  }

  template <Reuse kReuse, typename CursorOf>
  __device__ __forceinline__ void Load(
      const CursorOf& in, DualGradientItem<T, kElements, kGate>* item) const {
    loader_.template Load<kReuse, kReuse>(in, item);
    item->x2 = LoadVectorAt<kReuse, kElements>(x2_, in);
  }

 private:
  GradientLoader<T, kElements, kGate> loader_;
  const T* x2_;
};

// Whether constants are loaded again for each vector: beside the curves, gate
// kX leaves no registers for those of all elements.
template <Gate kGate, bool kCurve>
constexpr bool kLoadsAgain = kCurve && kGate == Gate::kX;

// The gate that computes again what comes before the activation.
template <typename T, int kElements, bool kCurve, typename SlabOf>
class DualGatingFromX {
 public:
  __device__ __forceinline__ DualGatingFromX(const BackwardBuffers& buffers,
                                             const DualSharedMemory& shared,
                                             const SlabOf& slab)
      : curve_(buffers.activation), normaliser_(shared, slab) {}

  __device__ __forceinline__ Values<Accumulator<T>, kElements> Apply(
      DualGradientItem<T, kElements, Gate::kX>* item) const {
    const auto& normaliser = *normaliser_;
    if constexpr (kCurve) {
      const Values<Accumulator<T>, kElements> e =
          curve_.template GradientOfInput</*kAnyCurve=*/true>(
              normaliser.Unrounded(item->x, item->x2), item->e.Get());
      item->e.Set(e);
      return e;
    } else {
      item->e.KeepPositive(normaliser.Rounded(item->x, item->x2));
      return item->e.Get();
    }
  }

 private:
  static constexpr bool kAgain = kLoadsAgain<Gate::kX, kCurve>;
  Curve<T, kElements> curve_;
  Computation<DualNormaliser<T, kElements, /*kRelu=*/false, kAgain>, kAgain,
              DualSharedMemory, SlabOf>
      normaliser_;
};

// Turns dy into e, and returns it as it was before it was rounded.
template <typename T, int kElements, Gate kGate, bool kCurve, typename SlabOf>
using DualGating =
    std::conditional_t<kGate == Gate::kX,
                       DualGatingFromX<T, kElements, kCurve, SlabOf>,
                       Gating<T, kElements, kGate, kCurve>>;

// One thread's sums: those of e and x1, and that of e * (x2 - mean2).
template <typename T, int kElements>
class DualGradientSums : public GradientSums<T, kElements> {
 public:
  using Base = GradientSums<T, kElements>;
  using A = Accumulator<T>;
  using V = Vector<T, kElements>;

  template <bool kAgain = false, typename SlabOf>
  __device__ __forceinline__ void LoadMeans(const DualSharedMemory& shared,
                                            const SlabOf& slab) {
    Base::template LoadMean<kAgain>(shared, slab);
    mean2_ =
        LoadConstants<A, kElements, kAgain>(shared.second, kGateMean, slab);
  }

  __device__ __forceinline__ void Clear() {
    Base::Clear();
#pragma unroll
    for (int i = 0; i < kElements; ++i) centred2_[i] = 0;
  }

  __device__ __forceinline__ void Accumulate(const Values<A, kElements>& es,
                                             const V& x1, const V& x2) {
    const Values<A, kElements> x2s = x2.Get();
    Base::Accumulate(es, x1);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      centred2_[i] =
          MultiplyAdd(es[i], Subtract(x2s[i], mean2_[i]), centred2_[i]);
    }
  }

  // The sums of x2, to which that of e belongs as well. Of(i) has those of x1.
  __device__ __forceinline__ Sums OfSecond(int i) const {
    return {Base::Of(i).first, centred2_[i]};
  }

 private:
  Values<A, kElements> mean2_;
  Values<A, kElements> centred2_;
};

// Calls f(form) with what is fixed in the kernel, or with the form of the call.
template <typename Form, typename F>
__device__ __forceinline__ void WithFormOf(const BackwardParameters& p, F f) {
  if constexpr (std::is_same_v<Form, AnyForm>) {
    WithDualBackwardForm(p.buffers.gate, p.buffers.activation.is_curve(), f);
  } else {
    f(Form{});
  }
}

// The constants of the sums, of both inputs. All threads of the block call it,
// and may use the constants afterwards.
template <typename A, typename SlabOf>
__device__ __forceinline__ void SetDualReduceConstants(
    const BackwardParameters& first, const BackwardParameters& second,
    const DualSharedMemory& shared, const SlabOf& slab) {
  SetReduceConstants<A>(first, shared, slab);
  SetReduceConstants<A>(second, shared.second, slab);
  const int column = static_cast<int>(threadIdx.x);
  if (slab.HasColumn(column)) shared.AddConstants<A>(kGateBias, column);
  __syncthreads();
}

// The sums of the block's share, of both inputs, in shared.sums and in
// shared.second.sums. All threads of the block call it.
template <typename T, int kElements, typename Form, typename SlabOf>
__device__ __forceinline__ void SumDualGradients(
    const BackwardParameters& first, const BackwardParameters& second,
    const DualSharedMemory& shared, const SlabOf& slab) {
  const Tiling& tiling = first.tiling;
  if (static_cast<int>(threadIdx.x) < tiling.columns) {
    shared.sums[threadIdx.x] = shared.second.sums[threadIdx.x] = {0, 0};
  }
  WithFormOf<Form>(first, [&](auto form) {
    constexpr Gate kGate = decltype(form)::kGate;
    constexpr bool kCurve = decltype(form)::kCurve;
    using Item = DualGradientItem<T, kElements, kGate>;
    // In float32, the other way would spill registers where channels are last,
    // for compute capability 10.0.
    constexpr Copies kCopies =
        sizeof(T) == 4 && kElements > 1 && !SlabOf::kPlanes ? Copies::kMany
        : kGate == Gate::kNone && kArchitecture < 900 && sizeof(T) == 2
            ? Copies::kFew
            : kCopiesOfGating<kGate, kCurve>;
    const DualGradientLoader<T, kElements, kGate> loader(first, second);
    DualGradientSums<T, kElements> sums;
    sums.Clear();
    auto in = loader.template At<1>(slab, 0);
    ForEachPart(
        slab.tiles(),
        [&](int begin, int end) {
          // Loaded for each part, these constants take up no registers while
          // sums are added. Gate kX and the sums have the same means.
          const DualGating<T, kElements, kGate, kCurve, SlabOf> gating(
              first.buffers, shared, slab);
          sums.LoadMeans(shared, slab);
          ForEachTile<kDualDepth<T, kElements, kGate, kCurve, SlabOf>, Item,
                      kCopies>(
              slab.Count(begin, end),
              [&](Item* item) {
                loader.template Load<Reuse::kSoon>(in, item);
                in.Advance();
              },
              [&](Item& item) {
                const auto e = gating.Apply(&item);
                if constexpr (kLoadsAgain<kGate, kCurve>) {
                  sums.template LoadMeans</*kAgain=*/true>(shared, slab);
                }
                sums.Accumulate(e, item.x, item.x2);
              });
        },
        [&] {
          AddToBlock<kElements>(tiling, shared, slab,
                                [&](int i) { return sums.Of(i); });
          AddToBlock<kElements>(tiling, shared.second, slab,
                                [&](int i) { return sums.OfSecond(i); });
          sums.Clear();
        });
  });
}

// Does what AddTeamInLast does, for the slabs of both inputs. The flag that
// says that the sums of x2 are there says so of those of x1, which come first.
__device__ __forceinline__ bool AddBothTeamsInLast(
    const BackwardParameters& p, const DualSharedMemory& shared, int64_t index,
    int rank) {
  const bool alone = p.block_reduction == BlockReduction::kSingleBlock;
  if (!alone) StorePartials(p.tiling, shared, p.workspace, 2 * index, rank);
  if (!AddTeamInLast(p.tiling, shared.second, p.workspace, p.block_reduction,
                     2 * index + 1, rank)) {
    return false;
  }
  if (!alone) AddPartials(p.tiling, shared, p.workspace, 2 * index);
  return true;
}

// Writes dx1 and dx2, the last tile first, because L2 may still hold it.
template <typename T, int kElements, typename Form, typename SlabOf>
__device__ __forceinline__ void ApplyDualTiles(const BackwardParameters& first,
                                               const BackwardParameters& second,
                                               const DualSharedMemory& shared,
                                               const SlabOf& slab) {
  WithFormOf<Form>(first, [&](auto form) {
    constexpr Gate kGate = decltype(form)::kGate;
    constexpr bool kCurve = decltype(form)::kCurve;
    using Item = DualGradientItem<T, kElements, kGate>;
    const DualGradientLoader<T, kElements, kGate> loader(first, second);
    const DualGating<T, kElements, kGate, kCurve, SlabOf> gating(first.buffers,
                                                                 shared, slab);
    constexpr bool kAgain = kLoadsAgain<kGate, kCurve>;
    using Appliers = Computation<Applier<T, kElements, kAgain>, kAgain,
                                 SharedMemory, SlabOf>;
    const Appliers applier1(shared, slab), applier2(shared.second, slab);
    T* dx1 = static_cast<T*>(first.dx);
    T* dx2 = static_cast<T*>(second.dx);
    const int count = slab.Count(0, slab.tiles());
    auto in = loader.template At<-1>(slab, count - 1);
    auto out = slab.template At<-1>(count - 1);
    // Below compute capability 9.0, the other way would spill a register of
    // 16-bit types.
    constexpr Copies kCopies =
        kGate == Gate::kX && kArchitecture < 900 && sizeof(T) == 2
            ? Copies::kFew
            : kCopiesOfGating<kGate, kCurve>;
    ForEachTile<kDualDepth<T, kElements, kGate, kCurve, SlabOf>, Item, kCopies>(
        count,
        [&](Item* item) {
          loader.template Load<Reuse::kNever>(in, item);
          in.Advance();
        },
        [&](Item& item) {
          gating.Apply(&item);
          StoreVectorAt<Reuse::kNever>(dx1, out,
                                       (*applier1).Of(item.e, item.x));
          StoreVectorAt<Reuse::kNever>(dx2, out,
                                       (*applier2).Of(item.e, item.x2));
          out.Advance();
        });
  });
}

// If `whole`, the sums are for a DualApplyKernel that follows; otherwise they
// are the caller's result.
template <typename T, Layout kLayout, int kElements, typename Form>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    DualReduceKernel(const __grid_constant__ BackwardParameters first,
                     const __grid_constant__ BackwardParameters second,
                     bool whole) {
  using A = Accumulator<T>;
  const DualSharedMemory shared;
  ForEachSlab<T, kLayout, kElements, /*kInputs=*/2>(
      first.tiling, /*last_first=*/false,
      [&](const auto& slab, int64_t index, int rank) {
        SetDualReduceConstants<A>(first, second, shared, slab);
        SumDualGradients<T, kElements, Form>(first, second, shared, slab);
        if (AddBothTeamsInLast(first, shared, index, rank)) {
          StoreTotals<A>(first, shared, slab, 2 * index, whole);
          StoreTotals<A>(second, shared.second, slab, 2 * index + 1, whole);
        }
      });
}

// If `whole`, the kernel takes the sums of a DualReduceKernel; otherwise it
// takes the caller's b and k.
template <typename T, Layout kLayout, int kElements, typename Form>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    DualApplyKernel(const __grid_constant__ BackwardParameters first,
                    const __grid_constant__ BackwardParameters second,
                    bool whole) {
  using A = Accumulator<T>;
  const DualSharedMemory shared;
  ForEachSlab<T, kLayout, kElements, /*kInputs=*/2>(
      first.tiling, /*last_first=*/true,
      [&](const auto& slab, int64_t index, int rank) {
        const bool store = rank == 0;
        SetDualReduceConstants<A>(first, second, shared, slab);
        LoadApplyConstants<A>(first, shared, slab, 2 * index, whole, store);
        LoadApplyConstants<A>(second, shared.second, slab, 2 * index + 1, whole,
                              store);
        ApplyDualTiles<T, kElements, Form>(first, second, shared, slab.Again());
      });
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_DUAL_BACKWARD_CUH_
