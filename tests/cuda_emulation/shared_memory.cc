#include "shared_memory.h"

#include <cstdint>
#include <cstring>

#include "fiber.h"

#if CUDA_EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace cuda_emulation {
namespace {

constexpr std::size_t kAlignment = 128;
// The bytes before the data, and as many behind it.
constexpr std::size_t kMargin = 1024;
constexpr unsigned char kMarginByte = 0xa5;

#if CUDA_EMULATION_ASAN
void Allow(unsigned char* data, std::size_t size) {
  __asan_unpoison_memory_region(data, size);
}

void Forbid(unsigned char* data, std::size_t size) {
  __asan_poison_memory_region(data, size);
}
#else
void Allow(unsigned char*, std::size_t) {}
void Forbid(unsigned char*, std::size_t) {}

bool AllMarginBytes(const unsigned char* bytes) {
  for (std::size_t i = 0; i < kMargin; ++i) {
    if (bytes[i] != kMarginByte) return false;
  }
  return true;
}
#endif

}  // namespace

void FillWithPoison(unsigned char* data, std::size_t size) {
  const unsigned char bytes[2] = {kPoison & 0xff, kPoison >> 8};
  if (size == 0) return;
  data[0] = bytes[0];
  if (size > 1) data[1] = bytes[1];
  // Each copy doubles the part that is filled. All sizes except the last are
  // even.
  for (std::size_t done = 2; done < size;) {
    const std::size_t count = done < size - done ? done : size - done;
    std::memcpy(data + done, data, count);
    done += count;
  }
}

SharedMemory::~SharedMemory() {
  if (buffer_ != nullptr) Allow(buffer_.get(), capacity_);
}

void SharedMemory::Start(std::size_t size) {
  const std::size_t capacity = size + 2 * kMargin + 3 * kAlignment;
  if (capacity > capacity_) {
    if (buffer_ != nullptr) Allow(buffer_.get(), capacity_);
    buffer_.reset(new unsigned char[capacity]);
    capacity_ = capacity;
  }
  Allow(buffer_.get(), capacity_);
  data_ = buffer_.get() + kMargin;
  // The address is an odd multiple: it is aligned as promised and no better.
  data_ += (-reinterpret_cast<std::uintptr_t>(data_) & (2 * kAlignment - 1));
  data_ += kAlignment;
  size_ = size;
  std::memset(data_ - kMargin, kMarginByte, kMargin);
  std::memset(data_ + size, kMarginByte, kMargin);
  FillWithPoison(data_, size);
  Forbid(buffer_.get(), static_cast<std::size_t>(data_ - buffer_.get()));
  Forbid(data_ + size,
         capacity_ - static_cast<std::size_t>(data_ + size - buffer_.get()));
}

bool SharedMemory::Finish() {
#if CUDA_EMULATION_ASAN
  Forbid(buffer_.get(), capacity_);
  return true;
#else
  // What other blocks of the cluster read from now on is garbage.
  FillWithPoison(data_, size_);
  return AllMarginBytes(data_ - kMargin) && AllMarginBytes(data_ + size_);
#endif
}

}  // namespace cuda_emulation
