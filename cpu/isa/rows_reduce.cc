// Computes the sums of backward over the columns of a rows tile, and dz.

#include <algorithm>

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/rows.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

// kStream has an effect only with a residual.
template <typename T, Gate kGate, bool kResidual, bool kStream>
void Reduce(const RowsTile& tile, const ReduceArgs& args) {
  using A = Accumulator<T>;
  const int64_t stride = tile.stride;
  const T* dy = static_cast<const T*>(args.dy);
  const T* x = static_cast<const T*>(args.x);
  T* dz = static_cast<T*>(args.dz);
  const void* saved = args.saved;
  const A* mean = static_cast<const A*>(args.mean);
  const A* a = static_cast<const A*>(args.a);
  const A* bias = static_cast<const A*>(args.bias);
  alignas(64) A s0[kSumColumns], s1[kSumColumns];
  ForEachBlock<kResidual ? 1 : 2>(
      tile, [&](const Block& block, auto streams) BNAR_LAMBDA {
        constexpr int kStreams = decltype(streams)::value;
        const int64_t columns = block.columns;
        std::fill(s0, s0 + columns, A{0});
        std::fill(s1, s1 + columns, A{0});
        for (int64_t r = block.begin; r < block.begin + block.count; ++r) {
          const int64_t row = r * stride + block.column;
          for (int64_t c = 0; c < columns; c += kVecLanes<A>) {
            const auto vectors = GateVectors<A>::template Columns<kGate>(
                mean, a, bias, block.column + c);
            Vec<A> sum = Load(s0 + c), sum_centred = Load(s1 + c);
            BNAR_UNROLL
            for (int k = 0; k < kStreams; ++k) {
              const int64_t at = row + k * block.distance * stride + c;
              const Vec<A> centred = Load(x + at) - vectors.mean;
              const GatedValue<T> gated = Gated<kGate>(
                  dy, saved, at,
                  [&]() BNAR_LAMBDA { return vectors.Normalised(centred); });
              sum = sum + gated.e;
              sum_centred = sum_centred + gated.e * centred;
              // The store comes after the load of x. If the arrays lie a
              // multiple of 4 KiB apart, that load would otherwise wait for
              // this store.
              if constexpr (kResidual) {
                StoreResult<T, kStream>(dz + at, gated.stored);
              }
            }
            StoreLanes(s0 + c, sum);
            StoreLanes(s1 + c, sum_centred);
          }
        }
        HandOver(block, s0, args.sum_e);
        HandOver(block, s1, args.sum_e_centred);
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace

template <typename T>
void RowsReduce(const RowsTile& tile, const ReduceArgs& args) {
  WithGate(args.gate, [&](auto gate) {
    WithResidual(args, [&](auto residual, auto stream) {
      Reduce<T, gate.value, residual.value, stream.value>(tile, args);
    });
  });
}

BNAR_INSTANTIATE(RowsReduce, RowsTile, ReduceArgs);

}  // namespace jax_bnar::cpu::BNAR_ISA
