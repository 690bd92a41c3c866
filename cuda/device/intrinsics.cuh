// Operations that CUDA C++ cannot express, each with an equivalent for the host
// emulation in the tests, and arithmetic that the compiler must not contract.

#ifndef JAX_BNAR_CUDA_DEVICE_INTRINSICS_CUH_
#define JAX_BNAR_CUDA_DEVICE_INTRINSICS_CUH_

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "cuda/host/parameters.h"

namespace jax_bnar {
namespace cuda {

__device__ __forceinline__ unsigned char* DynamicShared() {
#ifdef JAX_BNAR_CUDA_EMULATION
  return cuda_emulation::DynamicShared();
#else
  extern __shared__ __align__(128) unsigned char bytes[];
  return bytes;
#endif
}

// Returns the same bits as a value of another type.
template <typename To, typename From>
__device__ __forceinline__ To BitsAs(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bits would be lost");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// The compute capability that is compiled for, times 100. The host, and with it
// the emulation, has that of the device that the kernels are designed for. The
// emulation may have another, so that it runs what is compiled for it.
#ifdef __CUDA_ARCH__
constexpr int kArchitecture = __CUDA_ARCH__;
#elif defined(JAX_BNAR_EMULATED_ARCHITECTURE)
constexpr int kArchitecture = JAX_BNAR_EMULATED_ARCHITECTURE;
#else
constexpr int kArchitecture = 900;
#endif

// The version of the compiler: 1304 is CUDA 13.4.
#ifdef __CUDACC_VER_MAJOR__
constexpr int kCudaVersion = __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__;
#else
constexpr int kCudaVersion = 0;
#endif

// CUDA 13.0 compiles the same loops to more registers for compute
// capability 10.0 and newer, so that what a loop does not need must not wait in
// a register there.
constexpr bool kShortOfRegisters = kArchitecture >= 1000;

// The compiler does not know that the result is the same number, and computes
// anew what follows from it instead of keeping it in registers. For compute
// capability 9.0 it knows, because the registers suffice there.
template <typename T>
__device__ __forceinline__ T Anew(T value) {
#ifndef JAX_BNAR_CUDA_EMULATION
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "a register, or two");
  if constexpr (kArchitecture != 900 && sizeof(T) == 4) {
    asm volatile("" : "+r"(value));
  } else if constexpr (kArchitecture != 900) {
    asm volatile("" : "+l"(value));
  }
#endif
  return value;
}

// Loads 16 bytes of shared memory. Neither the compiler nor ptxas knows that
// they are the same as before, so they wait in no register for the next time.
__device__ __forceinline__ uint4 LoadSharedAgain(const uint4* address) {
#ifdef JAX_BNAR_CUDA_EMULATION
  return *address;
#else
  uint4 value;
  asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address)))
               : "memory");
  return value;
#endif
}

// Byte i of the result is filled with the highest bit of one byte of `value`:
// digit i of kBytes, from 8 to b, says which byte. __byte_perm cannot express
// this.
template <uint32_t kBytes>
__device__ __forceinline__ uint32_t RepeatSigns(uint32_t value) {
  static_assert((kBytes & 0xcccc) == 0x8888, "digits from 8 to b");
#ifdef JAX_BNAR_CUDA_EMULATION
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t byte = kBytes >> 4 * i & 3u;
    if ((value >> 8 * byte & 0x80u) != 0) result |= 0xffu << 8 * i;
  }
  return result;
#else
  uint32_t result;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(result) : "r"(value), "n"(kBytes));
  return result;
#endif
}

// Returns max(value, 0), and NaN for NaN.
__device__ __forceinline__ float MaxKeepingNan(float value) {
#ifdef JAX_BNAR_CUDA_EMULATION
  return value <= 0 ? 0.0f : value;
#else
  float result;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(value));
  return result;
#endif
}

// Returns a / b with an error of at most 2 ulp. The exact quotient is a call
// for some operands, and what must survive it takes registers.
__device__ __forceinline__ float DivideNearly(float a, float b) {
#ifdef JAX_BNAR_CUDA_EMULATION
  return a / b;
#else
  float result;
  asm("div.full.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
#endif
}

// Returns a / divisor for an `a` that is not negative and below 2^52. The
// product is off by at most one.
__device__ __forceinline__ int64_t Quotient(int64_t a, const Divisor& divisor) {
  const auto quotient =
      static_cast<int64_t>(static_cast<double>(a) * divisor.reciprocal);
  const int64_t rest = a - quotient * divisor.value;
  return quotient + (rest >= divisor.value ? 1 : 0) - (rest < 0 ? 1 : 0);
}

// Returns a / b for two numbers that are not negative. A 64-bit division takes
// much longer than one of 32 bits.
__device__ __forceinline__ int64_t Quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) != 0) return a / b;
  return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
}

// Memory accesses that other blocks see, each as a whole and from L2, and that
// order nothing else.
__device__ __forceinline__ Message LoadMessage(const Message* address) {
#ifdef JAX_BNAR_CUDA_EMULATION
  return cuda_emulation::LoadRelaxed(address);
#else
  uint64_t value, tag;
  asm volatile(
      "{\n"
      ".reg .b128 message;\n"
      "ld.relaxed.gpu.global.b128 message, [%2];\n"
      "mov.b128 {%0, %1}, message;\n"
      "}"
      : "=l"(value), "=l"(tag)
      : "l"(address)
      : "memory");
  return {BitsAs<double>(value), tag};
#endif
}
__device__ __forceinline__ void StoreMessage(Message* address,
                                             const Message& message) {
#ifdef JAX_BNAR_CUDA_EMULATION
  cuda_emulation::StoreRelaxed(address, message);
#else
  asm volatile(
      "{\n"
      ".reg .b128 message;\n"
      "mov.b128 message, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], message;\n"
      "}" ::"l"(address),
      "l"(BitsAs<uint64_t>(message.value)), "l"(message.tag)
      : "memory");
#endif
}
__device__ __forceinline__ uint64_t LoadFlag(const uint64_t* address) {
#ifdef JAX_BNAR_CUDA_EMULATION
  return cuda_emulation::LoadRelaxed(address);
#else
  uint64_t flag;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];"
               : "=l"(flag)
               : "l"(address)
               : "memory");
  return flag;
#endif
}
__device__ __forceinline__ void StoreFlag(uint64_t* address, uint64_t flag) {
#ifdef JAX_BNAR_CUDA_EMULATION
  cuda_emulation::StoreRelaxed(address, flag);
#else
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(flag)
               : "memory");
#endif
}

// Starts to fetch what lies there to L2, and waits for nothing.
__device__ __forceinline__ void PrefetchToL2(const void* address) {
#ifdef JAX_BNAR_CUDA_EMULATION
  (void)address;  // There is no cache.
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

// What this thread has read or written comes before what it reads or writes
// later, as other blocks see it. Other than __threadfence, this does not put
// the fences of all blocks into one order, and takes less time.
__device__ __forceinline__ void OrderMemory() {
#ifdef JAX_BNAR_CUDA_EMULATION
  __threadfence();
#else
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// Copies of 16 bytes from global to shared memory that go on while the thread
// does something else, and take none of its registers. A thread sees what it
// has copied itself once it has waited for it; others would need a barrier as
// well. The copies that a thread starts between two calls of CloseCopies form a
// group. A copy is started only under a condition, without a branch. L2 is to
// evict first what is not read again (`kAgain`).
template <bool kAgain>
__device__ __forceinline__ void StartCopyIf(bool condition, uint4* shared,
                                            const uint4* global) {
#ifdef JAX_BNAR_CUDA_EMULATION
  if (condition) cuda_emulation::StartCopy(shared, global, sizeof(uint4));
#else
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (kAgain) {
    asm volatile(
        "{\n"
        ".reg .pred condition;\n"
        "setp.ne.b32 condition, %2, 0;\n"
        "@condition cp.async.cg.shared.global [%0], [%1], 16;\n"
        "}" ::"r"(to),
        "l"(global), "r"(static_cast<int>(condition))
        : "memory");
  } else {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile(
        "{\n"
        ".reg .pred condition;\n"
        "setp.ne.b32 condition, %2, 0;\n"
        "@condition cp.async.cg.shared.global.L2::cache_hint"
        " [%0], [%1], 16, %3;\n"
        "}" ::"r"(to),
        "l"(global), "r"(static_cast<int>(condition)), "l"(policy)
        : "memory");
  }
#endif
}
__device__ __forceinline__ void CloseCopies() {
#ifdef JAX_BNAR_CUDA_EMULATION
  cuda_emulation::CloseCopies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most the last `groups` groups of this thread's copies are
// still under way, or fewer (GroupsLeft). The instruction wants a constant, so
// it is executed with one after the other until it has waited for enough. All
// threads of the warp that call this function together have the same number, so
// that their branches do not diverge.
__device__ __forceinline__ void WaitForAllCopiesBut(int groups) {
#ifdef JAX_BNAR_CUDA_EMULATION
  cuda_emulation::WaitForCopies(GroupsLeft(groups));
#else
  static_assert(kMostGroupsLeft == 5, "where the instruction begins");
  asm volatile(
      "{\n"
      ".reg .pred enough;\n"
      "cp.async.wait_group 5;\n"
      "setp.gt.s32 enough, %0, 4;\n"
      "@enough bra.uni DONE;\n"
      "cp.async.wait_group 4;\n"
      "setp.gt.s32 enough, %0, 3;\n"
      "@enough bra.uni DONE;\n"
      "cp.async.wait_group 3;\n"
      "setp.gt.s32 enough, %0, 2;\n"
      "@enough bra.uni DONE;\n"
      "cp.async.wait_group 2;\n"
      "setp.gt.s32 enough, %0, 1;\n"
      "@enough bra.uni DONE;\n"
      "cp.async.wait_group 1;\n"
      "setp.gt.s32 enough, %0, 0;\n"
      "@enough bra.uni DONE;\n"
      "cp.async.wait_group 0;\n"
      "DONE:\n"
      "}" ::"r"(groups)
      : "memory");
#endif
}

// The two halves of a barrier of all threads of all blocks of the cluster. What
// a block wrote to its shared memory before it arrived, the others read there
// after they have waited. Of accesses to global memory nothing is promised,
// which spares a wait for all of them.
__device__ __forceinline__ void ArriveAtCluster() {
#ifdef JAX_BNAR_CUDA_EMULATION
  cuda_emulation::ClusterArrive();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "fence.release.sync_restrict::shared::cta.cluster;\n"
      "barrier.cluster.arrive.relaxed.aligned;" ::
          : "memory");
#endif
}
__device__ __forceinline__ void WaitForCluster() {
#ifdef JAX_BNAR_CUDA_EMULATION
  cuda_emulation::ClusterWait();
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "barrier.cluster.wait.acquire.aligned;\n"
      "fence.acquire.sync_restrict::shared::cluster.cluster;" ::
          : "memory");
#endif
}

// Returns the value at the same place in the shared memory of another block of
// the cluster.
__device__ __forceinline__ Sums LoadFromBlock(const Sums* address,
                                              uint32_t rank) {
#ifdef JAX_BNAR_CUDA_EMULATION
  return *static_cast<const Sums*>(
      cuda_emulation::MapShared(const_cast<Sums*>(address), rank));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t mine =
      static_cast<uint32_t>(__cvta_generic_to_shared(address));
  uint32_t theirs;
  Sums value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(theirs)
               : "r"(mine), "r"(rank));
  asm volatile("ld.shared::cluster.v2.f64 {%0, %1}, [%2];"
               : "=d"(value.first), "=d"(value.second)
               : "r"(theirs)
               : "memory");
  return value;
#else
  return *address;  // This code is never launched with clusters.
#endif
}

// These are written out so that forward and backward round alike, whatever the
// compiler contracts elsewhere, because the gate of a ReLU is computed twice.
__device__ __forceinline__ float Subtract(float a, float b) {
  return __fadd_rn(a, -b);
}
__device__ __forceinline__ double Subtract(double a, double b) {
  return __dadd_rn(a, -b);
}
__device__ __forceinline__ float Add(float a, float b) {
  return __fadd_rn(a, b);
}
__device__ __forceinline__ double Add(double a, double b) {
  return __dadd_rn(a, b);
}
__device__ __forceinline__ float MultiplyAdd(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double MultiplyAdd(double a, double b, double c) {
  return __fma_rn(a, b, c);
}

}  // namespace cuda
}  // namespace jax_bnar

#endif  // JAX_BNAR_CUDA_DEVICE_INTRINSICS_CUH_
