// Linked into wheels that run on older distributions (JAX_BNAR_MANYLINUX).

// If a process has a single thread, libstdc++ counts the references of a
// shared_ptr without atomic instructions. It reads this variable of glibc,
// which older versions than 2.32 lack. Here it always says that there may be
// more.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
