#include "cpu/executor.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <thread>
#include <utility>

namespace jax_bnar::cpu {
namespace {

constexpr int kSpinsBeforeYield = 256;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// The state that the threads of one Run share. It outlives the call: a closure
// that starts late finds every task taken and touches nothing else.
class Control {
 public:
  Control(std::vector<Phase> phases, int64_t threads)
      : phases_(std::move(phases)),
        threads_(threads),
        taken_(phases_.size() * static_cast<size_t>(threads)),
        done_(phases_.size()) {}

  // `self`, in [0, threads), is the share to begin with.
  void Work(int64_t self) {
    for (size_t p = 0; p < phases_.size(); ++p) {
      for (int64_t other = 0; other < threads_; ++other) {
        WorkOnShare(p, (self + other) % threads_);
      }
      const int64_t num_tasks = phases_[p].num_tasks;
      for (int spins = 0;
           done_[p].count.load(std::memory_order_acquire) < num_tasks;
           ++spins) {
        if (spins < kSpinsBeforeYield) {
          Pause();
        } else {
          std::this_thread::yield();
        }
      }
    }
  }

 private:
  // Each counter has a cache line of its own, which avoids false sharing.
  struct alignas(64) Counter {
    std::atomic<int64_t> count{0};
  };

  void WorkOnShare(size_t p, int64_t share) {
    const Phase& phase = phases_[p];
    const int64_t begin = phase.num_tasks * share / threads_;
    const int64_t end = phase.num_tasks * (share + 1) / threads_;
    std::atomic<int64_t>& taken =
        taken_[p * static_cast<size_t>(threads_) + static_cast<size_t>(share)]
            .count;
    for (;;) {
      const int64_t i = taken.fetch_add(1, std::memory_order_relaxed);
      if (i >= end - begin) return;
      phase.run(phase.last_first ? end - 1 - i : begin + i);
      done_[p].count.fetch_add(1, std::memory_order_release);
    }
  }

  std::vector<Phase> phases_;
  int64_t threads_;
  std::vector<Counter> taken_;
  std::vector<Counter> done_;
};

}  // namespace

void Run(ThreadPool& pool, int64_t max_threads, std::vector<Phase> phases) {
  int64_t widest = 0;
  for (const Phase& phase : phases) widest = std::max(widest, phase.num_tasks);
  const int64_t threads = std::min({pool.num_threads(), max_threads, widest});
  auto control = std::make_shared<Control>(std::move(phases),
                                           std::max<int64_t>(1, threads));
  for (int64_t t = 1; t < threads; ++t) {
    // Scheduling allocates memory. If there is none, fewer threads do the work,
    // each of which visits all shares. The exception must not pass: the threads
    // that have begun read what the caller would destroy.
    try {
      pool.Schedule([control, t] { control->Work(t); });
    } catch (const std::exception&) {
      break;
    }
  }
  control->Work(0);
}

}  // namespace jax_bnar::cpu
