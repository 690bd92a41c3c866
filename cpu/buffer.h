// Uninitialised scratch memory, aligned to a cache line.

#ifndef JAX_BNAR_CPU_BUFFER_H_
#define JAX_BNAR_CPU_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>

namespace jax_bnar::cpu {

template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t size)
      : data_(static_cast<T*>(::operator new(
            static_cast<size_t>(size) * sizeof(T), kAlignment))) {
    static_assert(std::is_trivial_v<T>, "elements are left uninitialised");
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};

  struct Delete {
    void operator()(T* p) const { ::operator delete(p, kAlignment); }
  };

  std::unique_ptr<T[], Delete> data_;
};

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_BUFFER_H_
