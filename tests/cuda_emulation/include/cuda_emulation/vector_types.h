// CUDA's vector types with their alignments, and dim3.

#ifndef CUDA_EMULATION_VECTOR_TYPES_H_
#define CUDA_EMULATION_VECTOR_TYPES_H_

#define CUDA_EMULATION_VECTOR2(name, element, alignment) \
  struct alignas(alignment) name##2 { element x, y; };   \
  inline name##2 make_##name##2(element x, element y) { return {x, y}; }
#define CUDA_EMULATION_VECTOR3(name, element)                      \
  struct name##3 { element x, y, z; };                             \
  inline name##3 make_##name##3(element x, element y, element z) { \
    return {x, y, z};                                              \
  }
#define CUDA_EMULATION_VECTOR4(name, element, alignment)                      \
  struct alignas(alignment) name##4 { element x, y, z, w; };                  \
  inline name##4 make_##name##4(element x, element y, element z, element w) { \
    return {x, y, z, w};                                                      \
  }

CUDA_EMULATION_VECTOR2(char, signed char, 2)
CUDA_EMULATION_VECTOR2(uchar, unsigned char, 2)
CUDA_EMULATION_VECTOR2(short, short, 4)
CUDA_EMULATION_VECTOR2(ushort, unsigned short, 4)
CUDA_EMULATION_VECTOR2(int, int, 8)
CUDA_EMULATION_VECTOR2(uint, unsigned, 8)
CUDA_EMULATION_VECTOR2(longlong, long long, 16)
CUDA_EMULATION_VECTOR2(ulonglong, unsigned long long, 16)
CUDA_EMULATION_VECTOR2(float, float, 8)
CUDA_EMULATION_VECTOR2(double, double, 16)
CUDA_EMULATION_VECTOR3(int, int)
CUDA_EMULATION_VECTOR3(uint, unsigned)
CUDA_EMULATION_VECTOR3(float, float)
CUDA_EMULATION_VECTOR4(char, signed char, 4)
CUDA_EMULATION_VECTOR4(uchar, unsigned char, 4)
CUDA_EMULATION_VECTOR4(short, short, 8)
CUDA_EMULATION_VECTOR4(ushort, unsigned short, 8)
CUDA_EMULATION_VECTOR4(int, int, 16)
CUDA_EMULATION_VECTOR4(uint, unsigned, 16)
CUDA_EMULATION_VECTOR4(float, float, 16)

#undef CUDA_EMULATION_VECTOR2
#undef CUDA_EMULATION_VECTOR3
#undef CUDA_EMULATION_VECTOR4

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1)
      : x(x_), y(y_), z(z_) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return uint3{x, y, z}; }
};

#endif  // CUDA_EMULATION_VECTOR_TYPES_H_
