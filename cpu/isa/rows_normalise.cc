// Computes y of a rows tile.

#include <cstring>

#include "cpu/isa/elements.h"
#include "cpu/isa/flags.h"
#include "cpu/isa/kernels.h"
#include "cpu/isa/rows.h"

namespace jax_bnar::cpu::BNAR_ISA {
namespace {

template <typename T, bool kRelu, bool kResidual, bool kMask, bool kStream>
void Normalise(const RowsTile& tile, const NormaliseArgs& args) {
  using A = Accumulator<T>;
  const T* x = static_cast<const T*>(args.x);
  const T* z = static_cast<const T*>(args.z);
  T* y = static_cast<T*>(args.y);
  uint8_t* mask = args.mask;
  const A* means = static_cast<const A*>(args.mean);
  const A* multipliers = static_cast<const A*>(args.a);
  const A* biases = static_cast<const A*>(args.bias);
  ForEachElement<T, kStream>(
      tile, [&](int64_t index, int64_t distance, int64_t column,
                auto streams) BNAR_LAMBDA {
        const Vec<A> mean = Load(means + column);
        const Vec<A> a = Load(multipliers + column);
        const Vec<A> bias = Load(biases + column);
        BNAR_UNROLL
        for (int k = 0; k < decltype(streams)::value; ++k) {
          const int64_t at = index + k * distance;
          const Vec<A> value = NormalisedElements<kRelu, kResidual>(
              Load(x + at), kResidual ? z + at : z, mean, a, bias);
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
void RowsNormalise(const RowsTile& tile, const NormaliseArgs& args) {
  WithNormaliseFlags(
      args, [&](auto relu, auto residual, auto mask, auto stream) {
        Normalise<T, relu.value, residual.value, mask.value, stream.value>(
            tile, args);
      });
}

BNAR_INSTANTIATE(RowsNormalise, RowsTile, NormaliseArgs);

}  // namespace jax_bnar::cpu::BNAR_ISA
