// Part of wheels that other machines install (JAX_BNAR_MANYLINUX): what newer
// headers would ask the C library for, so that an older one will do.

// libstdc++ looks whether the process has one thread, and then counts the
// references of a shared_ptr without atomic instructions. glibc has the variable
// since 2.32; this one says that there may be several.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
