#include "cpu/executor.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>

namespace jax_bnar {
namespace {

constexpr int kSpinsBeforeYield = 256;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Outlives the call: a closure that starts late finds every task taken and
// touches nothing else.
class Control {
 public:
  explicit Control(std::vector<Phase> phases)
      : phases_(std::move(phases)), progress_(phases_.size()) {}

  void Work() {
    for (size_t p = 0; p < phases_.size(); ++p) {
      const int64_t num_tasks = phases_[p].num_tasks;
      Progress& progress = progress_[p];
      for (;;) {
        const int64_t task =
            progress.next.fetch_add(1, std::memory_order_relaxed);
        if (task >= num_tasks) break;
        phases_[p].run(task);
        progress.done.fetch_add(1, std::memory_order_release);
      }
      for (int spins = 0;
           progress.done.load(std::memory_order_acquire) < num_tasks; ++spins) {
        if (spins < kSpinsBeforeYield) {
          Pause();
        } else {
          std::this_thread::yield();
        }
      }
    }
  }

 private:
  // A cache line each: one is hammered while the other is watched.
  struct Progress {
    alignas(64) std::atomic<int64_t> next{0};
    alignas(64) std::atomic<int64_t> done{0};
  };

  std::vector<Phase> phases_;
  std::vector<Progress> progress_;
};

}  // namespace

void Run(ThreadPool& pool, int64_t max_threads, std::vector<Phase> phases) {
  int64_t widest = 0;
  for (const Phase& phase : phases) widest = std::max(widest, phase.num_tasks);
  const int64_t threads = std::min({pool.num_threads(), max_threads, widest});
  auto control = std::make_shared<Control>(std::move(phases));
  for (int64_t t = 1; t < threads; ++t) {
    pool.Schedule([control] { control->Work(); });
  }
  control->Work();
}

}  // namespace jax_bnar
