// The elements that a thread reads or writes at once: eight (16 bytes of a
// 16-bit type, or 32 of float32), or one where rows are not aligned for eight.

#ifndef JAX_BNAR_CUDA_DEVICE_VECTOR_CUH_
#define JAX_BNAR_CUDA_DEVICE_VECTOR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device/intrinsics.cuh"
#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// Conversions between an element as it is stored and the type in which it is
// added. Elements of 16 bits can also be handled in pairs, with the first in
// the lower half of a register, so that one instruction converts, compares or
// clamps both.
template <typename T>
struct Element;

template <>
struct Element<__half> {
  using Accumulator = float;
  using Bits = unsigned short;
  static __device__ __forceinline__ float Decode(Bits bits) {
    return __half2float(__ushort_as_half(bits));
  }
  static __device__ __forceinline__ Bits Encode(float value) {
    return __half_as_ushort(__float2half_rn(value));
  }
  static __device__ __forceinline__ float2 Decode2(uint32_t pair) {
    return __half22float2(BitsAs<__half2>(pair));
  }
  static __device__ __forceinline__ uint32_t Encode2(float low, float high) {
    return BitsAs<uint32_t>(__floats2half2_rn(low, high));
  }
  // Returns the maximum of each element and 0. NaN stays NaN.
  static __device__ __forceinline__ uint32_t Relu2(uint32_t pair) {
    return BitsAs<uint32_t>(
        __hmax2_nan(BitsAs<__half2>(pair), BitsAs<__half2>(uint32_t{0})));
  }
  // Sets all bits of each element that is above 0, and clears the others.
  static __device__ __forceinline__ uint32_t Positive2(uint32_t pair) {
    return __hgt2_mask(BitsAs<__half2>(pair), BitsAs<__half2>(uint32_t{0}));
  }
};

template <>
struct Element<__nv_bfloat16> {
  using Accumulator = float;
  using Bits = unsigned short;
  static __device__ __forceinline__ float Decode(Bits bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  }
  static __device__ __forceinline__ Bits Encode(float value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
  static __device__ __forceinline__ float2 Decode2(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16),
                       __uint_as_float(pair & 0xffff0000u));
  }
  static __device__ __forceinline__ uint32_t Encode2(float low, float high) {
    return BitsAs<uint32_t>(__floats2bfloat162_rn(low, high));
  }
  static __device__ __forceinline__ uint32_t Relu2(uint32_t pair) {
    return BitsAs<uint32_t>(__hmax2_nan(BitsAs<__nv_bfloat162>(pair),
                                        BitsAs<__nv_bfloat162>(uint32_t{0})));
  }
  static __device__ __forceinline__ uint32_t Positive2(uint32_t pair) {
    return __hgt2_mask(BitsAs<__nv_bfloat162>(pair),
                       BitsAs<__nv_bfloat162>(uint32_t{0}));
  }
};

template <>
struct Element<float> {
  using Accumulator = float;
  using Bits = unsigned int;
  static __device__ __forceinline__ float Decode(Bits bits) {
    return __uint_as_float(bits);
  }
  static __device__ __forceinline__ Bits Encode(float value) {
    return __float_as_uint(value);
  }
};

template <>
struct Element<double> {
  using Accumulator = double;
  using Bits = unsigned long long;
  static __device__ __forceinline__ double Decode(Bits bits) {
    return __longlong_as_double(static_cast<long long>(bits));
  }
  static __device__ __forceinline__ Bits Encode(double value) {
    return static_cast<Bits>(__double_as_longlong(value));
  }
};

template <typename T>
using Accumulator = typename Element<T>::Accumulator;

// The elements of a vector, or a constant for each of them, in the type of the
// computation.
template <typename A, int kElements>
struct Values {
  A at[kElements];
  __device__ __forceinline__ A operator[](int i) const { return at[i]; }
  __device__ __forceinline__ A& operator[](int i) { return at[i]; }
};

template <typename T, int kElements>
struct Vector;

// A vector of a single element.
template <typename T>
struct Vector<T, 1> {
  using A = Accumulator<T>;
  using Word = typename Element<T>::Bits;
  static constexpr int kWords = 1;
  Word word;

  __device__ __forceinline__ Word GetWord(int) const { return word; }
  __device__ __forceinline__ void SetWord(int, Word value) { word = value; }

  __device__ __forceinline__ Values<A, 1> Get() const {
    return {{Element<T>::Decode(word)}};
  }
  __device__ __forceinline__ void Set(const Values<A, 1>& values) {
    word = Element<T>::Encode(values[0]);
  }
  __device__ __forceinline__ void Relu() {
    if (Element<T>::Decode(word) <= 0) word = 0;  // NaN stays NaN.
  }
  __device__ __forceinline__ uint32_t PositiveBits() const {
    return Element<T>::Decode(word) > 0 ? 1 : 0;
  }
  __device__ __forceinline__ void KeepPositive(const Vector& of) {
    if (!(Element<T>::Decode(of.word) > 0)) word = 0;
  }
  __device__ __forceinline__ void KeepBits(uint32_t bits) {
    if ((bits & 1u) == 0) word = 0;
  }
};

// Eight elements in words of 16 bytes, each of which takes four registers.
template <typename T>
struct Vector<T, 8> {
  using A = Accumulator<T>;
  using Word = uint4;
  static constexpr bool kPairs = sizeof(T) == 2;
  static constexpr int kWords = static_cast<int>(sizeof(T)) / 2;
  uint32_t parts[4 * kWords];

  __device__ __forceinline__ Word GetWord(int i) const {
    return make_uint4(parts[4 * i], parts[4 * i + 1], parts[4 * i + 2],
                      parts[4 * i + 3]);
  }
  __device__ __forceinline__ void SetWord(int i, const Word& word) {
    parts[4 * i] = word.x;
    parts[4 * i + 1] = word.y;
    parts[4 * i + 2] = word.z;
    parts[4 * i + 3] = word.w;
  }

  __device__ __forceinline__ Values<A, 8> Get() const {
    Values<A, 8> values;
    if constexpr (kPairs) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = Element<T>::Decode2(parts[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = Element<T>::Decode(parts[i]);
    }
    return values;
  }
  // Rounds the values to T.
  __device__ __forceinline__ void Set(const Values<A, 8>& values) {
    if constexpr (kPairs) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        parts[i] = Element<T>::Encode2(values[2 * i], values[2 * i + 1]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) parts[i] = Element<T>::Encode(values[i]);
    }
  }

  // Elements below 0 become 0, and so does -0. NaN stays NaN.
  __device__ __forceinline__ void Relu() {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      if constexpr (kPairs) {
        parts[i] = Element<T>::Relu2(parts[i]);
      } else {
        parts[i] = __float_as_uint(MaxKeepingNan(__uint_as_float(parts[i])));
      }
    }
  }

  // Bit i of the result says whether element i is above 0.
  __device__ __forceinline__ uint32_t PositiveBits() const {
    if constexpr (kPairs) {
      // Each element gives a byte, of which one bit is kept. The highest byte
      // of the product is the sum of these bytes.
      const uint32_t low =
          __byte_perm(Element<T>::Positive2(parts[0]),
                      Element<T>::Positive2(parts[1]), 0x6420) &
          0x08040201u;
      const uint32_t high =
          __byte_perm(Element<T>::Positive2(parts[2]),
                      Element<T>::Positive2(parts[3]), 0x6420) &
          0x80402010u;
      return ((low | high) * 0x01010101u) >> 24;
    } else {
      uint32_t bits = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        bits |= (__uint_as_float(parts[i]) > 0 ? 1u : 0u) << i;
      }
      return bits;
    }
  }

  // Sets elements to 0 where those of another vector are not above 0.
  __device__ __forceinline__ void KeepPositive(const Vector& of) {
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      if constexpr (kPairs) {
        parts[i] &= Element<T>::Positive2(of.parts[i]);
      } else {
        if (!(__uint_as_float(of.parts[i]) > 0)) parts[i] = 0;
      }
    }
  }

  // Sets elements to 0 where their bit is 0.
  __device__ __forceinline__ void KeepBits(uint32_t bits) {
    if constexpr (kPairs) {
      // Bit i of four bits becomes the highest bit of byte i. The four copies
      // are 7 bits apart and do not overlap.
      const uint32_t low = (bits & 15u) * 0x10204080u;
      const uint32_t high = (bits >> 4 & 15u) * 0x10204080u;
      parts[0] &= RepeatSigns<0x9988>(low);
      parts[1] &= RepeatSigns<0xbbaa>(low);
      parts[2] &= RepeatSigns<0x9988>(high);
      parts[3] &= RepeatSigns<0xbbaa>(high);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if ((bits >> i & 1u) == 0) parts[i] = 0;
      }
    }
  }
};

// The lanes of a warp that share vectors of float32 (Tiling::word_step) with
// this one. Lane i of them has the words i and step + i, and in a mask the byte
// of vector i, of the words 2 i and 2 i + 1. So the lanes exchange four bits of
// each word.
class SharingLanes {
 public:
  __device__ __forceinline__ explicit SharingLanes(int step)
      : step_(step),
        lane_(static_cast<int>(threadIdx.x) & (step - 1)),
        first_(static_cast<int>(threadIdx.x) & 31 & -step) {}

  // Turns the bits of a lane's words into the byte of its vector. All lanes
  // that share vectors call it, and BitsOfByte.
  __device__ __forceinline__ uint32_t ByteOfBits(uint32_t bits) const {
    const int word = 2 * lane_;
    const int at = word < step_ ? 0 : 4;
    const int from = word & (step_ - 1);
    const uint32_t low = From(from, bits) >> at & 15u;
    const uint32_t high = From(from + 1, bits) >> at & 15u;
    return low | high << 4;
  }
  // The reverse.
  __device__ __forceinline__ uint32_t BitsOfByte(uint32_t byte) const {
    const int at = 4 * (lane_ & 1);
    const int from = lane_ / 2;
    const uint32_t low = From(from, byte) >> at & 15u;
    const uint32_t high = From(from + step_ / 2, byte) >> at & 15u;
    return low | high << 4;
  }

 private:
  __device__ __forceinline__ uint32_t From(int lane, uint32_t value) const {
    const uint32_t lanes = 0xffffffffu >> (32 - step_) << first_;
    return __shfl_sync(lanes, value, first_ + lane);
  }

  const int step_;
  const int lane_;   // Among those that share.
  const int first_;  // Of those that share, in the warp.
};

// Turns the bits of a thread's elements into a byte of a mask, and the reverse.
template <typename T>
__device__ __forceinline__ uint32_t ByteOfBits(int word_step, uint32_t bits) {
  if (sizeof(T) != sizeof(float) || word_step == 1) return bits;
  return SharingLanes(word_step).ByteOfBits(bits);
}
template <typename T>
__device__ __forceinline__ uint32_t BitsOfByte(int word_step, uint32_t byte) {
  if (sizeof(T) != sizeof(float) || word_step == 1) return byte;
  return SharingLanes(word_step).BitsOfByte(byte);
}

// Whether a value is needed again soon.
enum class Reuse { kSoon, kNever };

// Loads a vector whose words are `step` words apart.
template <Reuse kReuse, int kElements, typename T>
__device__ __forceinline__ Vector<T, kElements> LoadVector(const T* address,
                                                           int step = 1) {
  using V = Vector<T, kElements>;
  const auto* words = reinterpret_cast<const typename V::Word*>(address);
  V vector;
#pragma unroll
  for (int i = 0; i < V::kWords; ++i) {
    if constexpr (kReuse == Reuse::kNever) {
      vector.SetWord(i, __ldcs(words + i * step));
    } else {
      vector.SetWord(i, words[i * step]);
    }
  }
  return vector;
}
// Loads the vector of an array at which a cursor stands.
template <Reuse kReuse, int kElements, typename T, typename CursorOf>
__device__ __forceinline__ Vector<T, kElements> LoadVectorAt(
    const T* array, const CursorOf& in) {
  return LoadVector<kReuse, kElements>(array + in.offset(), in.word_step());
}

template <Reuse kReuse, int kElements, typename T>
__device__ __forceinline__ void StoreVector(T* address,
                                            const Vector<T, kElements>& vector,
                                            int step = 1) {
  using V = Vector<T, kElements>;
  auto* words = reinterpret_cast<typename V::Word*>(address);
#pragma unroll
  for (int i = 0; i < V::kWords; ++i) {
    if constexpr (kReuse == Reuse::kNever) {
      __stcs(words + i * step, vector.GetWord(i));
    } else {
      words[i * step] = vector.GetWord(i);
    }
  }
}
template <Reuse kReuse, int kElements, typename T, typename CursorOf>
__device__ __forceinline__ void StoreVectorAt(
    T* array, const CursorOf& out, const Vector<T, kElements>& vector) {
  StoreVector<kReuse>(array + out.offset(), vector, out.word_step());
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_VECTOR_CUH_
