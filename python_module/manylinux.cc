// This file is linked into wheels that run on older distributions
// (JAX_BNAR_MANYLINUX).

// In a process with a single thread, libstdc++ counts the references of a
// shared_ptr without atomic instructions. It learns from this variable of
// glibc, which versions before 2.32 lack, whether there is only one. The
// definition here always says that there may be more.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

// From glibc 2.38 on, <stdlib.h> gives C++ other functions for strtol and its
// like, which read binary numbers too and which older versions lack. libstdc++
// and the inline atoll call them. Nobody here asks for a base of 2 or 0.
#define BNAR_OLD_STRTO(name, type)                                       \
  extern "C" type bnar_##name(const char*, char**, int) __asm__(#name);  \
  extern "C" __attribute__((visibility("hidden"))) type __isoc23_##name( \
      const char* text, char** end, int base) {                          \
    return bnar_##name(text, end, base);                                 \
  }                                                                      \
  static_assert(true, "a semicolon follows")

BNAR_OLD_STRTO(strtol, long);
BNAR_OLD_STRTO(strtoll, long long);
BNAR_OLD_STRTO(strtoul, unsigned long);
BNAR_OLD_STRTO(strtoull, unsigned long long);
