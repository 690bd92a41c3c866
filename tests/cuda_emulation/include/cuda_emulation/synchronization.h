// Barriers of blocks and warps, shuffles, votes and fences.

#ifndef CUDA_EMULATION_SYNCHRONIZATION_H_
#define CUDA_EMULATION_SYNCHRONIZATION_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda_emulation.h"

namespace cuda_emulation {

enum class BarrierKind { kPlain, kOr, kAnd, kCount };
// Returns the vote on `predicate`.
int BlockBarrier(BarrierKind kind, bool predicate);

enum class WarpOperation {
  kSync,
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kBallot,
  kAny,
  kAll,
};
std::uint64_t WarpCollective(WarpOperation operation, unsigned mask,
                             std::uint64_t value, int argument, int width);
// Returns the index of the running thread within its warp.
unsigned Lane();

template <typename T>
T ShuffleValue(WarpOperation operation, unsigned mask, T value, int argument,
               int width) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "shuffles move 4 or 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  bits = WarpCollective(operation, mask, bits, argument, width);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

}  // namespace cuda_emulation

inline void __syncthreads() {
  cuda_emulation::BlockBarrier(cuda_emulation::BarrierKind::kPlain, false);
}
inline int __syncthreads_or(int predicate) {
  return cuda_emulation::BlockBarrier(cuda_emulation::BarrierKind::kOr,
                                      predicate != 0);
}
inline int __syncthreads_and(int predicate) {
  return cuda_emulation::BlockBarrier(cuda_emulation::BarrierKind::kAnd,
                                      predicate != 0);
}
inline int __syncthreads_count(int predicate) {
  return cuda_emulation::BlockBarrier(cuda_emulation::BarrierKind::kCount,
                                      predicate != 0);
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  cuda_emulation::WarpCollective(cuda_emulation::WarpOperation::kSync, mask, 0,
                                 0, warpSize);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize) {
  return cuda_emulation::ShuffleValue(cuda_emulation::WarpOperation::kShuffle,
                                      mask, value, lane, width);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize) {
  return cuda_emulation::ShuffleValue(cuda_emulation::WarpOperation::kShuffleUp,
                                      mask, value, static_cast<int>(delta),
                                      width);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta,
                   int width = warpSize) {
  return cuda_emulation::ShuffleValue(
      cuda_emulation::WarpOperation::kShuffleDown, mask, value,
      static_cast<int>(delta), width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize) {
  return cuda_emulation::ShuffleValue(
      cuda_emulation::WarpOperation::kShuffleXor, mask, value, lane_mask,
      width);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return static_cast<unsigned>(
      cuda_emulation::WarpCollective(cuda_emulation::WarpOperation::kBallot,
                                     mask, predicate != 0, 0, warpSize));
}
inline int __any_sync(unsigned mask, int predicate) {
  return static_cast<int>(cuda_emulation::WarpCollective(
      cuda_emulation::WarpOperation::kAny, mask, predicate != 0, 0, warpSize));
}
inline int __all_sync(unsigned mask, int predicate) {
  return static_cast<int>(cuda_emulation::WarpCollective(
      cuda_emulation::WarpOperation::kAll, mask, predicate != 0, 0, warpSize));
}
// CUDA never promises which lanes run together. Here, no two lanes do.
inline unsigned __activemask() { return 1u << cuda_emulation::Lane(); }

// All fibers of a launch share one host thread, so only the compiler may
// reorder.
inline void __threadfence_block() { __atomic_signal_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

inline void __nanosleep(unsigned) { cuda_emulation::Yield(); }

[[noreturn]] inline void __trap() { cuda_emulation::Fail("__trap()"); }

#endif  // CUDA_EMULATION_SYNCHRONIZATION_H_
