// A block's dynamic shared memory: full of NaN when a block starts, and not
// to be touched beyond its size.

#ifndef CUDA_EMULATION_SHARED_MEMORY_H_
#define CUDA_EMULATION_SHARED_MEMORY_H_

#include <cstddef>
#include <memory>

namespace cuda_emulation {

// Uninitialised data: 16 bits that are NaN as half and as bfloat16, in pairs
// as float, in fours as double.
constexpr unsigned short kPoison = 0xfffd;

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&&) = default;
  ~SharedMemory();

  // For a new block.
  void Start(std::size_t size);
  // The block has exited; nobody may touch its memory any more. Returns false
  // if something wrote outside (without AddressSanitizer, which reports it).
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
