// Computes y of a rows tile from two inputs.

#include <cstring>

#include "cpu/isa/dual.h"
#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/rows.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, bool kMask, bool kStream>
void Normalise(const RowsTile& tile, const DualNormaliseArgs& args) {
  using A = Accumulator<T>;
  const T* x1 = static_cast<const T*>(args.x[0]);
  const T* x2 = static_cast<const T*>(args.x[1]);
  T* y = static_cast<T*>(args.y);
  uint8_t* mask = args.mask;
  const DualColumns<A> columns(args);
  ForEachElement<T, kStream>(
      tile, [&](int64_t index, int64_t distance, int64_t column,
                auto streams) BNAR_LAMBDA {
        const auto vectors = columns.template At<Gate::kX>(column);
        BNAR_UNROLL
        for (int i = 0; i < decltype(streams)::value; ++i) {
          const int64_t at = index + i * distance;
          const Vec<A> value = Relu(vectors.Normalised(
              Load(x1 + at) - vectors.mean1, Load(x2 + at) - vectors.mean2));
          StoreResult<T, kStream>(y + at, Round<T>(value));
          if constexpr (kMask) {
            const auto bits = static_cast<MaskBits<A>>(PositiveBits<T>(value));
            std::memcpy(mask + at / 8, &bits, sizeof(bits));
          }
        }
      });
  if constexpr (kStream) StreamingFence();
}

}  // namespace

template <typename T>
void RowsDualNormalise(const RowsTile& tile, const DualNormaliseArgs& args) {
  WithBool(args.mask != nullptr, [&](auto mask) {
    WithBool(args.stream, [&](auto stream) {
      Normalise<T, mask.value, stream.value>(tile, args);
    });
  });
}

BNAR_INSTANTIATE(RowsDualNormalise, RowsTile, DualNormaliseArgs);

}  // namespace jax_bnar::cpu::BNAR_ISA
