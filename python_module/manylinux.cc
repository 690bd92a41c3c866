// This file is linked into wheels that run on older distributions
// (JAX_BNAR_MANYLINUX).

// In a process with a single thread, libstdc++ counts the references of a
// shared_ptr without atomic instructions. It learns from this variable of
// glibc, which versions before 2.32 lack, whether there is only one. The
// definition here always says that there may be more.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
