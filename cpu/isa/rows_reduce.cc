// Computes the sums of backward over the columns of a rows tile, and dz.

#include <algorithm>

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/inputs.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/prefetch.h"
#include "cpu/isa/rows.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename In, typename Out, int N, Gate kGate, bool kResidual>
void Reduce(const RowsTile& tile, const ReduceArgs<N>& args) {
  using A = Accumulator<In>;
  const int64_t stride = tile.stride;
  const Out* dy = static_cast<const Out*>(args.dy);
  const Pointers<const In, N> x(args.x);
  Out* dz = static_cast<Out*>(args.dz);
  const void* saved = args.saved;
  const bool non_temporal = kResidual && args.non_temporal;
  const InputColumns<A, N> columns(args);
  const Lookahead<A> ahead(tile, args);
  alignas(64) A s0[kSumColumns], s1[N][kSumColumns];
  ForEachBlock<kResidual ? 1 : 2>(tile, [&](const Block& block,
                                            auto streams) BNAR_LAMBDA {
    constexpr int kStreams = decltype(streams)::value;
    const int64_t count = block.columns;
    std::fill(s0, s0 + count, A{0});
    ForEachInput<N>([&](auto input) BNAR_LAMBDA {
      std::fill(s1[input], s1[input] + count, A{0});
    });
    for (int64_t r = block.begin; r < block.begin + block.count; ++r) {
      const int64_t row = r * stride + block.column;
      for (int64_t c = 0; c < count; c += kVecLanes<A>) {
        const auto vectors = columns.template At<kGate>(block.column + c);
        Vec<A> sum = Load(s0 + c);
        auto sum_centred = InputVecsOf<A, N>(
            [&](auto input) BNAR_LAMBDA { return Load(s1[input] + c); });
        BNAR_UNROLL
        for (int k = 0; k < kStreams; ++k) {
          const int64_t at = row + k * block.distance * stride + c;
          ahead.template OfBackward<kGate>(dy, x, saved, at);
          const auto centred = vectors.Centred(
              [&](auto input) BNAR_LAMBDA { return Load(x[input] + at); });
          const GatedValue<Out> gated = Gated<kGate>(
              dy, saved, at,
              [&]() BNAR_LAMBDA { return vectors.Normalised(centred); });
          sum = sum + gated.e;
          ForEachInput<N>([&](auto input) BNAR_LAMBDA {
            sum_centred[input] = sum_centred[input] + gated.e * centred[input];
          });
          // The store comes after the load of x. If the arrays lie a
          // multiple of 4 KiB apart, that load would otherwise wait for
          // this store.
          if constexpr (kResidual) {
            StoreResult(non_temporal, dz + at, gated.stored);
          }
        }
        StoreLanes(s0 + c, sum);
        ForEachInput<N>([&](auto input) BNAR_LAMBDA {
          StoreLanes(s1[input] + c, sum_centred[input]);
        });
      }
    }
    HandOver(block, s0, args.sum_e);
    ForEachInput<N>([&](auto input) BNAR_LAMBDA {
      HandOver<A>(block, s1[input], args.sum_e_centred[input]);
    });
  });
  if (non_temporal) NonTemporalFence();
}

}  // namespace

template <typename In, typename Out, int N>
void RowsReduce(const RowsTile& tile, const ReduceArgs<N>& args) {
  if constexpr (std::is_same_v<In, Out>) {
    if (args.gate != Gate::kNone && args.activation.is_curve()) {
      return RowsReduceCurve<In, N>(tile, args);
    }
  }
  WithReduceFlags(args, [&](auto gate, auto residual) {
    Reduce<In, Out, N, gate.value, residual.value>(tile, args);
  });
}

BNAR_INSTANTIATE_ALL(RowsReduce, RowsTile, ReduceArgs)

}  // namespace jax_bnar::cpu::BNAR_ISA
