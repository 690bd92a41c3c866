// Fibers, which are stacks to switch between within one host thread.

#ifndef CUDA_EMULATION_FIBER_H_
#define CUDA_EMULATION_FIBER_H_

#include <cstddef>
#include <memory>
#include <vector>

#if !defined(__x86_64__) && !defined(__aarch64__) && \
    !defined(CUDA_EMULATION_UCONTEXT)
#define CUDA_EMULATION_UCONTEXT
#endif
#ifdef CUDA_EMULATION_UCONTEXT
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_EMULATION_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_EMULATION_ASAN 1
#endif
#endif
#ifndef CUDA_EMULATION_ASAN
#define CUDA_EMULATION_ASAN 0
#endif

namespace cuda_emulation {

// The place where code on a stack stopped. The host thread's own stack has one
// as well.
struct Fiber {
#ifdef CUDA_EMULATION_UCONTEXT
  ucontext_t state;
#else
  void* stack_pointer = nullptr;
#endif
  // Null and 0 for the host thread's stack until it is left under
  // AddressSanitizer.
  const void* stack = nullptr;
  std::size_t stack_size = 0;
  bool idle = false;           // Whether it is in its pool.
  void* fake_stack = nullptr;  // Belongs to AddressSanitizer.
};

// Continues `to`. Returns when something switches back to `from`, which is the
// running fiber.
void SwitchFiber(Fiber* from, Fiber* to);

// Fibers that all run the same function, which must not return. Their stacks
// live as long as the pool. Below most of them lies a page that must not be
// touched.
class FiberPool {
 public:
  explicit FiberPool(void (*function)()) : function_(function) {}
  ~FiberPool();
  FiberPool(const FiberPool&) = delete;
  FiberPool& operator=(const FiberPool&) = delete;

  // Makes sure that this many fibers exist. Returns false if memory is short.
  bool Reserve(std::size_t count);
  Fiber* Take() {
    Fiber* fiber = free_.back();
    free_.pop_back();
    fiber->idle = false;
    return fiber;
  }
  // Returns a fiber to the pool. It continues from where it left when it is
  // next switched to.
  void Give(Fiber* fiber) {
    fiber->idle = true;
    free_.push_back(fiber);
  }
  // Takes back all fibers that were taken, wherever they stopped. They will
  // start from the beginning.
  void Abandon();

 private:
  void Initialise(Fiber* fiber);

  void (*function_)();
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> free_;
  std::vector<void*> mappings_;
};

}  // namespace cuda_emulation

#endif  // CUDA_EMULATION_FIBER_H_
