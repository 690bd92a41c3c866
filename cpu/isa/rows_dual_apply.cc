// Computes dx1 and dx2 of a rows tile.

#include "cpu/isa/dual.h"
#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/rows.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, Gate kGate, bool kStream>
void Apply(const RowsTile& tile, const DualApplyArgs& args) {
  using A = Accumulator<T>;
  const T* dy = static_cast<const T*>(args.dy);
  const T* x1 = static_cast<const T*>(args.x[0]);
  const T* x2 = static_cast<const T*>(args.x[1]);
  const void* saved = args.saved;
  T* dx1 = static_cast<T*>(args.dx[0]);
  T* dx2 = static_cast<T*>(args.dx[1]);
  const DualColumns<A> columns(args);
  const A* b1s = static_cast<const A*>(args.b[0]);
  const A* b2s = static_cast<const A*>(args.b[1]);
  const A* k1s = static_cast<const A*>(args.k[0]);
  const A* k2s = static_cast<const A*>(args.k[1]);
  ForEachElement<T, kStream>(
      tile, [&](int64_t index, int64_t distance, int64_t column,
                auto streams) BNAR_LAMBDA {
        const auto vectors = columns.template At<kGate>(column);
        const Vec<A> a1 = Load(columns.a1 + column);
        const Vec<A> a2 = Load(columns.a2 + column);
        const Vec<A> b1 = Load(b1s + column), b2 = Load(b2s + column);
        const Vec<A> k1 = Load(k1s + column), k2 = Load(k2s + column);
        BNAR_UNROLL
        for (int i = 0; i < decltype(streams)::value; ++i) {
          const int64_t at = index + i * distance;
          const Vec<A> centred1 = Load(x1 + at) - vectors.mean1;
          const Vec<A> centred2 = Load(x2 + at) - vectors.mean2;
          const Vec<A> e = Gated<kGate>(dy, saved, at, [&]() BNAR_LAMBDA {
                             return vectors.Normalised(centred1, centred2);
                           }).e;
          StoreResult<T, kStream>(dx1 + at,
                                  GradientElements<T>(e, centred1, a1, b1, k1));
          StoreResult<T, kStream>(dx2 + at,
                                  GradientElements<T>(e, centred2, a2, b2, k2));
        }
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace

template <typename T>
void RowsDualApply(const RowsTile& tile, const DualApplyArgs& args) {
  WithDualGate(args.gate, [&](auto gate) {
    WithBool(args.stream, [&](auto stream) {
      Apply<T, gate.value, stream.value>(tile, args);
    });
  });
}

BNAR_INSTANTIATE(RowsDualApply, RowsTile, DualApplyArgs);

}  // namespace jax_bnar::cpu::BNAR_ISA
