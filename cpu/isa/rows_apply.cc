// Computes dx of a rows tile.

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/rows.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, Gate kGate, bool kStream>
void Apply(const RowsTile& tile, const ApplyArgs& args) {
  using A = Accumulator<T>;
  const T* dy = static_cast<const T*>(args.e);
  const T* x = static_cast<const T*>(args.x);
  T* dx = static_cast<T*>(args.dx);
  const A* mean = static_cast<const A*>(args.mean);
  const A* a = static_cast<const A*>(args.a);
  const A* b = static_cast<const A*>(args.b);
  const A* k = static_cast<const A*>(args.k);
  const A* bias = static_cast<const A*>(args.bias);
  const void* saved = args.saved;
  ForEachElement<T, kStream>(
      tile, [&](int64_t index, int64_t distance, int64_t column,
                auto streams) BNAR_LAMBDA {
        const auto vectors =
            GateVectors<A>::template Columns<kGate>(mean, a, bias, column);
        const Vec<A> of_e = Load(a + column);
        const Vec<A> of_x = Load(b + column);
        const Vec<A> constant = Load(k + column);
        BNAR_UNROLL
        for (int i = 0; i < decltype(streams)::value; ++i) {
          const int64_t at = index + i * distance;
          const Vec<A> centred = Load(x + at) - vectors.mean;
          const Vec<A> e = Gated<kGate>(dy, saved, at, [&]() BNAR_LAMBDA {
                             return vectors.Normalised(centred);
                           }).e;
          StoreResult<T, kStream>(
              dx + at, GradientElements<T>(e, centred, of_e, of_x, constant));
        }
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace

template <typename T>
void RowsApply(const RowsTile& tile, const ApplyArgs& args) {
  WithGate(args.gate, [&](auto gate) {
    WithBool(args.stream, [&](auto stream) {
      Apply<T, gate.value, stream.value>(tile, args);
    });
  });
}

BNAR_INSTANTIATE(RowsApply, RowsTile, ApplyArgs);

}  // namespace jax_bnar::cpu::BNAR_ISA
