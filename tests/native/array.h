// Operands that end exactly where their memory ends. AddressSanitizer detects
// reads and writes one byte too far; without it, canaries detect the writes.

#ifndef JAX_BNAR_TESTS_NATIVE_ARRAY_H_
#define JAX_BNAR_TESTS_NATIVE_ARRAY_H_

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "tests/native/check.h"
#include "tests/native/formats.h"

namespace jax_bnar {
namespace testing {

class ExactMemory {
 public:
  // The data begins `lead` bytes after a multiple of 128.
  ExactMemory(int64_t size, int64_t lead) : size_(size), lead_(lead) {
    void* base = nullptr;
    if (posix_memalign(&base, 128, static_cast<size_t>(total())) != 0) {
      std::abort();
    }
    base_.reset(static_cast<uint8_t*>(base));
    // This also fills the data itself, which no kernel has written yet.
    std::memset(base, kCanary, static_cast<size_t>(total()));
  }

  ExactMemory(const ExactMemory&) = delete;
  ExactMemory& operator=(const ExactMemory&) = delete;

  ~ExactMemory() {
    bool intact = true;
    for (int64_t i = 0; i < lead_; ++i) intact &= base_[i] == kCanary;
    for (int64_t i = lead_ + size_; i < total(); ++i) {
      intact &= base_[i] == kCanary;
    }
    BNAR_CHECK(intact, "a kernel wrote outside an array");
  }

  uint8_t* data() { return base_.get() + lead_; }
  const uint8_t* data() const { return base_.get() + lead_; }
  int64_t size() const { return size_; }

  std::vector<uint8_t> Copy() const { return {data(), data() + size_}; }

 private:
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };

  static constexpr uint8_t kCanary = 0x5a;
#ifdef BNAR_TEST_ADDRESS_SANITIZER
  static constexpr int64_t kTrail = 0;
#else
  static constexpr int64_t kTrail = 128;
#endif

  int64_t total() const { return lead_ + size_ + kTrail; }

  int64_t size_;
  int64_t lead_;
  std::unique_ptr<uint8_t[], Free> base_;
};

class Array {
 public:
  // `lead` is a number of elements.
  Array(DType dtype, int64_t size, int64_t lead)
      : dtype_(dtype),
        item_size_(FormatOf(dtype).item_size),
        size_(size),
        memory_(size * item_size_, lead * item_size_) {}

  int64_t size() const { return size_; }
  void* data() { return memory_.data(); }
  const void* data() const { return memory_.data(); }
  const ExactMemory& memory() const { return memory_; }

  double operator[](int64_t i) const {
    return Decode(dtype_, memory_.data() + i * item_size_);
  }
  // Rounds the value to the dtype.
  void Set(int64_t i, double value) {
    Encode(dtype_, RoundTo(FormatOf(dtype_), value),
           memory_.data() + i * item_size_);
  }

 private:
  DType dtype_;
  int64_t item_size_;
  int64_t size_;
  ExactMemory memory_;
};

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_ARRAY_H_
