// Where a mask has the bits of a vector, in one tile after the other.

#ifndef JAX_BNAR_CUDA_DEVICE_MASK_CURSOR_CUH_
#define JAX_BNAR_CUDA_DEVICE_MASK_CURSOR_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

// Takes the place of the pointer where there is no mask.
struct NoMask {
  __device__ __forceinline__ explicit NoMask(const void*) {}
};

// These classes extend a cursor of the elements, `Base`, by
//   mask_byte()   the byte with the bits of the vector
//   mask_bit()    the lowest of them in this byte
// They go the same way as the cursor (`kStep` is 1 or -1). A group's bits begin
// at `group`, which points at uint8_t or const uint8_t.

// A vector of eight elements where channels are last: a byte of its own. `bit`
// is that of the vector in the first tile.
template <typename Base, int kStep, typename Byte>
class RowsMaskCursor : public Base {
 public:
  __device__ __forceinline__ RowsMaskCursor(const Base& base,
                                            const Tiling& tiling, Byte* group,
                                            int64_t bit, int tile)
      : Base(base),
        tiling_(tiling),
        byte_(group + bit / 8 + tile * tiling.mask_tile_stride) {}

  __device__ __forceinline__ Byte& mask_byte() const { return *byte_; }
  __device__ __forceinline__ int mask_bit() const { return 0; }
  __device__ __forceinline__ void Advance() {
    Base::Advance();
    byte_ += kStep * tiling_.mask_tile_stride;
  }

 private:
  const Tiling& tiling_;
  Byte* byte_;
};

// The same for a single element.
template <typename Base, int kStep, typename Byte>
class RowsMaskBitCursor : public Base {
 public:
  __device__ __forceinline__ RowsMaskBitCursor(const Base& base,
                                               const Tiling& tiling,
                                               Byte* group, int64_t bit,
                                               int tile)
      : Base(base),
        tiling_(tiling),
        group_(group),
        bit_(bit + tile * tiling.mask_tile_stride) {}

  __device__ __forceinline__ Byte& mask_byte() const {
    return group_[bit_ >> 3];
  }
  __device__ __forceinline__ int mask_bit() const {
    return static_cast<int>(bit_ & 7);
  }
  __device__ __forceinline__ void Advance() {
    Base::Advance();
    bit_ += kStep * tiling_.mask_tile_stride;
  }

 private:
  const Tiling& tiling_;
  Byte* group_;
  int64_t bit_;
};

// Where channels are first, the bits are in the order of the elements. `first`
// is the first element of the group.
template <typename Base, typename Byte>
class PlanesMaskCursor : public Base {
 public:
  __device__ __forceinline__ PlanesMaskCursor(const Base& base, Byte* group,
                                              int64_t first)
      : Base(base), group_(group), first_(first) {}

  __device__ __forceinline__ Byte& mask_byte() const {
    return group_[(this->offset() - first_) >> 3];
  }
  __device__ __forceinline__ int mask_bit() const {
    return static_cast<int>((this->offset() - first_) & 7);
  }

 private:
  Byte* group_;
  int64_t first_;
};

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_MASK_CURSOR_CUH_
