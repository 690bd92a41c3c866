// A block's dynamic shared memory. It is full of NaN when a block starts, and
// must not be touched beyond its size.

#ifndef CUDA_EMULATION_SHARED_MEMORY_H_
#define CUDA_EMULATION_SHARED_MEMORY_H_

#include <cstddef>
#include <memory>

namespace cuda_emulation {

// The pattern of uninitialised data: 16 bits that are NaN as half and as
// bfloat16, in pairs as float, and in fours as double.
constexpr unsigned short kPoison = 0xfffd;

void FillWithPoison(unsigned char* data, std::size_t size);

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&&) = default;
  ~SharedMemory();

  // Prepares the memory for a new block.
  void Start(std::size_t size);
  // Is called when the block has exited, after which nobody may touch its
  // memory. Returns false if something wrote outside of it. (With
  // AddressSanitizer, the sanitizer reports that instead.)
  bool Finish();

  unsigned char* data() { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::unique_ptr<unsigned char[]> buffer_;
  std::size_t capacity_ = 0;
  unsigned char* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace cuda_emulation

#endif  // CUDA_EMULATION_SHARED_MEMORY_H_
