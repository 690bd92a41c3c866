// Pseudorandom numbers, from which everything that varies is drawn.

#ifndef CUDA_EMULATION_RANDOM_H_
#define CUDA_EMULATION_RANDOM_H_

#include <cstddef>
#include <cstdint>
#include <utility>

namespace cuda_emulation {

// splitmix64, which mixes all bits well.
inline std::uint64_t Mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

template <typename T>
void Shuffle(T* items, std::size_t count, std::uint64_t seed) {
  for (std::size_t i = count; i > 1; --i) {
    seed = Mix(seed);
    std::swap(items[i - 1], items[seed % i]);
  }
}

}  // namespace cuda_emulation

#endif  // CUDA_EMULATION_RANDOM_H_
