// Computes the sums of backward over the columns of a rows tile, with two
// inputs.

#include <algorithm>

#include "cpu/isa/dual.h"
#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/rows.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, Gate kGate>
void Reduce(const RowsTile& tile, const DualReduceArgs& args) {
  using A = Accumulator<T>;
  const int64_t stride = tile.stride;
  const T* dy = static_cast<const T*>(args.dy);
  const T* x1 = static_cast<const T*>(args.x[0]);
  const T* x2 = static_cast<const T*>(args.x[1]);
  const void* saved = args.saved;
  const DualColumns<A> columns(args);
  alignas(64) A s0[kSumColumns], s1[kSumColumns], s2[kSumColumns];
  ForEachBlock<2>(tile, [&](const Block& block, auto streams) BNAR_LAMBDA {
    constexpr int kStreams = decltype(streams)::value;
    std::fill(s0, s0 + block.columns, A{0});
    std::fill(s1, s1 + block.columns, A{0});
    std::fill(s2, s2 + block.columns, A{0});
    for (int64_t r = block.begin; r < block.begin + block.count; ++r) {
      const int64_t row = r * stride + block.column;
      for (int64_t c = 0; c < block.columns; c += kVecLanes<A>) {
        const auto vectors = columns.template At<kGate>(block.column + c);
        Vec<A> sum = Load(s0 + c);
        Vec<A> sum_centred1 = Load(s1 + c), sum_centred2 = Load(s2 + c);
        BNAR_UNROLL
        for (int i = 0; i < kStreams; ++i) {
          const int64_t at = row + i * block.distance * stride + c;
          const Vec<A> centred1 = Load(x1 + at) - vectors.mean1;
          const Vec<A> centred2 = Load(x2 + at) - vectors.mean2;
          const Vec<A> e = Gated<kGate>(dy, saved, at, [&]() BNAR_LAMBDA {
                             return vectors.Normalised(centred1, centred2);
                           }).e;
          sum = sum + e;
          sum_centred1 = sum_centred1 + e * centred1;
          sum_centred2 = sum_centred2 + e * centred2;
        }
        StoreLanes(s0 + c, sum);
        StoreLanes(s1 + c, sum_centred1);
        StoreLanes(s2 + c, sum_centred2);
      }
    }
    HandOver(block, s0, args.sum_e);
    HandOver(block, s1, args.sum_e_centred[0]);
    HandOver(block, s2, args.sum_e_centred[1]);
  });
}

}  // namespace

template <typename T>
void RowsDualReduce(const RowsTile& tile, const DualReduceArgs& args) {
  WithDualGate(args.gate,
               [&](auto gate) { Reduce<T, gate.value>(tile, args); });
}

BNAR_INSTANTIATE(RowsDualReduce, RowsTile, DualReduceArgs);

}  // namespace jax_bnar::cpu::BNAR_ISA
