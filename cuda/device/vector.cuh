// The elements that a thread reads or writes at once: eight (16 bytes of a
// 16-bit type, 32 of float32), or one where rows are not aligned for that.

#ifndef JAX_BNAR_CUDA_DEVICE_VECTOR_CUH_
#define JAX_BNAR_CUDA_DEVICE_VECTOR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace jax_bnar {
namespace cuda {

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

// Whether a value is wanted again soon.
enum class Reuse { kSoon, kNever };

template <typename Word, Reuse kReuse>
__device__ __forceinline__ Word LoadWord(const Word* address) {
  if constexpr (kReuse == Reuse::kNever) {
    return __ldcs(address);
  } else {
    return *address;
  }
}

template <typename Word, Reuse kReuse>
__device__ __forceinline__ void StoreWord(Word* address, Word word) {
  if constexpr (kReuse == Reuse::kNever) {
    __stcs(address, word);
  } else {
    *address = word;
  }
}

template <typename T, int kElements>
struct Vector;

template <typename T>
struct Vector<T, 1> {
  using Word = typename Element<T>::Bits;
  static constexpr int kWords = 1;
  Word words[1];

  __device__ __forceinline__ Accumulator<T> Get(int) const {
    return Element<T>::Decode(words[0]);
  }
  __device__ __forceinline__ void Set(int, Accumulator<T> value) {
    words[0] = Element<T>::Encode(value);
  }
};

// Eight elements in 16-byte words.
template <typename T>
struct Vector<T, 8> {
  using Word = uint4;
  static constexpr int kWords = static_cast<int>(sizeof(T)) / 2;
  Word words[kWords];

  __device__ __forceinline__ uint32_t Part(int i) const {
    const uint4& word = words[i / 4];
    switch (i % 4) {
      case 0:
        return word.x;
      case 1:
        return word.y;
      case 2:
        return word.z;
      default:
        return word.w;
    }
  }
  __device__ __forceinline__ void SetPart(int i, uint32_t value) {
    uint4& word = words[i / 4];
    switch (i % 4) {
      case 0:
        word.x = value;
        break;
      case 1:
        word.y = value;
        break;
      case 2:
        word.z = value;
        break;
      default:
        word.w = value;
    }
  }

  __device__ __forceinline__ Accumulator<T> Get(int i) const {
    if constexpr (sizeof(T) == 2) {
      const uint32_t pair = Part(i / 2);
      return Element<T>::Decode(static_cast<unsigned short>(
          i % 2 == 0 ? pair & 0xffffu : pair >> 16));
    } else {
      return Element<T>::Decode(Part(i));
    }
  }
  __device__ __forceinline__ void Set(int i, Accumulator<T> value) {
    const uint32_t bits = Element<T>::Encode(value);
    if constexpr (sizeof(T) == 2) {
      const uint32_t pair = Part(i / 2);
      SetPart(i / 2, i % 2 == 0 ? (pair & 0xffff0000u) | bits
                                : (pair & 0xffffu) | (bits << 16));
    } else {
      SetPart(i, bits);
    }
  }
};

template <Reuse kReuse, int kElements, typename T>
__device__ __forceinline__ Vector<T, kElements> LoadVector(const T* address) {
  using V = Vector<T, kElements>;
  V vector;
#pragma unroll
  for (int i = 0; i < V::kWords; ++i) {
    vector.words[i] = LoadWord<typename V::Word, kReuse>(
        reinterpret_cast<const typename V::Word*>(address) + i);
  }
  return vector;
}

template <Reuse kReuse, int kElements, typename T>
__device__ __forceinline__ void StoreVector(
    T* address, const Vector<T, kElements>& vector) {
  using V = Vector<T, kElements>;
#pragma unroll
  for (int i = 0; i < V::kWords; ++i) {
    StoreWord<typename V::Word, kReuse>(
        reinterpret_cast<typename V::Word*>(address) + i, vector.words[i]);
  }
}

// What is left of a value once it is stored as T.
template <typename T>
__device__ __forceinline__ Accumulator<T> Rounded(Accumulator<T> value) {
  return Element<T>::Decode(Element<T>::Encode(value));
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_VECTOR_CUH_
