// Runs a sequence of parallel phases on somebody else's thread pool.

#ifndef JAX_BNAR_CPU_EXECUTOR_H_
#define JAX_BNAR_CPU_EXECUTOR_H_

#include <cstdint>
#include <functional>
#include <vector>

namespace jax_bnar::cpu {

// A set of independent tasks. Each phase starts when the one before it is
// complete.
//
// Each thread begins with a contiguous share of the tasks, the same share in
// every phase, and helps the others when it is done. So a phase finds in the
// caches of a core what the phase before it left there (two cores may well have
// an L3 cache each). If `last_first` is set, each share is processed backwards.
struct Phase {
  int64_t num_tasks;
  std::function<void(int64_t task)> run;
  bool last_first = false;
};

class ThreadPool {
 public:
  virtual ~ThreadPool() = default;
  virtual int64_t num_threads() const = 0;
  // Runs the closure at some time on some thread, perhaps after Run has
  // returned.
  virtual void Schedule(std::function<void()> closure) = 0;
};

// Runs the phases and returns when the last one is complete. The caller works
// too, and no thread ever waits for a task that no running thread has taken.
// With several devices on one pool, a handler that waited for scheduled
// closures would deadlock (PyAutoLabs/PyAutoFit#1530 met this in XLA itself).
void Run(ThreadPool& pool, int64_t max_threads, std::vector<Phase> phases);

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_EXECUTOR_H_
