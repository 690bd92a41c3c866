#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#if CUDA_EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace cuda_emulation {

#ifndef CUDA_EMULATION_UCONTEXT
// Pushes the registers that a called function must preserve, stores the stack
// pointer in *from, and does the reverse with `to`. The floating-point control
// registers are the same for all fibers.
extern "C" __attribute__((visibility("hidden"))) void cuda_emulation_switch(
    void** from, void* to);
#endif

#if defined(CUDA_EMULATION_UCONTEXT)
#elif defined(__x86_64__)
__asm__(R"(
  .text
  .p2align 4
  .globl cuda_emulation_switch
  .hidden cuda_emulation_switch
  .type cuda_emulation_switch, @function
cuda_emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size cuda_emulation_switch, . - cuda_emulation_switch
)");
#elif defined(__aarch64__)
__asm__(R"(
  .text
  .p2align 4
  .globl cuda_emulation_switch
  .hidden cuda_emulation_switch
  .type cuda_emulation_switch, %function
cuda_emulation_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
  .size cuda_emulation_switch, . - cuda_emulation_switch
)");
#endif

namespace {

// AddressSanitizer puts red zones around each variable.
constexpr std::size_t kStackSize = (CUDA_EMULATION_ASAN ? 192 : 64) * 1024;
constexpr std::size_t kStacksPerMapping = 64;
// Each protected page splits a mapping in two, and Linux lets a process have
// 65530 mappings. The later stacks of devices with many SMs therefore have no
// protected page.
constexpr std::size_t kGuardedStacks = 4096;

std::size_t PageSize() { return static_cast<std::size_t>(getpagesize()); }

#if CUDA_EMULATION_ASAN
// The fiber that switched to the running one.
thread_local Fiber* previous = nullptr;

// Is the first call on a stack after a switch to it.
void Arrive(void* fake_stack) {
  const void* stack;
  std::size_t stack_size;
  __sanitizer_finish_switch_fiber(fake_stack, &stack, &stack_size);
  if (previous->stack == nullptr) {
    previous->stack = stack;
    previous->stack_size = stack_size;
  }
}
#else
void Arrive(void*) {}
#endif

thread_local void (*entry)() = nullptr;

// A new fiber starts here, and has nobody to return to.
void Enter() {
  Arrive(nullptr);
  entry();
  __builtin_trap();
}

}  // namespace

void SwitchFiber(Fiber* from, Fiber* to) {
#if CUDA_EMULATION_ASAN
  previous = from;
  __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->stack_size);
#endif
#ifdef CUDA_EMULATION_UCONTEXT
  swapcontext(&from->state, &to->state);
#else
  cuda_emulation_switch(&from->stack_pointer, to->stack_pointer);
#endif
  Arrive(from->fake_stack);
}

FiberPool::~FiberPool() {
#if CUDA_EMULATION_ASAN
  // Memory that is mapped later in the same place must not inherit red zones.
  for (const auto& fiber : fibers_) {
    __asan_unpoison_memory_region(fiber->stack, fiber->stack_size);
  }
#endif
  for (void* mapping : mappings_) {
    munmap(mapping, kStacksPerMapping * (kStackSize + PageSize()));
  }
}

bool FiberPool::Reserve(std::size_t count) {
  // The pool and its fibers belong to one host thread.
  entry = function_;
  while (fibers_.size() < count) {
    const std::size_t stride = kStackSize + PageSize();
    void* mapping =
        mmap(nullptr, kStacksPerMapping * stride, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) return false;
    mappings_.push_back(mapping);
    char* stack = static_cast<char*>(mapping);
    for (std::size_t i = 0; i < kStacksPerMapping; ++i, stack += stride) {
      if (fibers_.size() < kGuardedStacks) {
        // If this fails, an overflow goes unnoticed.
        (void)mprotect(stack, PageSize(), PROT_NONE);
      }
      auto fiber = std::make_unique<Fiber>();
      fiber->stack = stack + PageSize();
      fiber->stack_size = kStackSize;
      Initialise(fiber.get());
      Give(fiber.get());
      fibers_.push_back(std::move(fiber));
    }
  }
  return true;
}

void FiberPool::Abandon() {
  for (const auto& fiber : fibers_) {
    if (fiber->idle) continue;
#if CUDA_EMULATION_ASAN
    // The functions that never returned left their red zones behind.
    __asan_unpoison_memory_region(fiber->stack, fiber->stack_size);
#endif
    Initialise(fiber.get());
    Give(fiber.get());
  }
}

void FiberPool::Initialise(Fiber* fiber) {
  fiber->fake_stack = nullptr;
  char* stack = static_cast<char*>(const_cast<void*>(fiber->stack));
#ifdef CUDA_EMULATION_UCONTEXT
  getcontext(&fiber->state);
  fiber->state.uc_stack.ss_sp = stack;
  fiber->state.uc_stack.ss_size = fiber->stack_size;
  fiber->state.uc_link = nullptr;
  makecontext(&fiber->state, &Enter, 0);
#else
  auto* top = reinterpret_cast<std::uintptr_t*>(stack + fiber->stack_size);
  // Null frame pointers and return addresses end a debugger's backtrace.
#if defined(__x86_64__)
  // The stack holds six registers, the address to go to, and the return address
  // of Enter, which expects the stack as a call leaves it: aligned to 16 bytes
  // except for that address.
  std::uintptr_t* bottom = top - 8;
  for (int i = 0; i < 8; ++i) bottom[i] = 0;
  bottom[6] = reinterpret_cast<std::uintptr_t>(&Enter);
#else
  std::uintptr_t* bottom = top - 20;
  for (int i = 0; i < 20; ++i) bottom[i] = 0;
  bottom[11] = reinterpret_cast<std::uintptr_t>(&Enter);  // x30
#endif
  fiber->stack_pointer = bottom;
#endif
}

}  // namespace cuda_emulation
