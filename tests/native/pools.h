// Thread pools for tests.

#ifndef JAX_BNAR_TESTS_NATIVE_POOLS_H_
#define JAX_BNAR_TESTS_NATIVE_POOLS_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "cpu/executor.h"

namespace jax_bnar {
namespace testing {

// A pool whose only thread is the caller's.
class CallerOnly : public cpu::ThreadPool {
 public:
  int64_t num_threads() const override { return 1; }
  void Schedule(std::function<void()> closure) override { closure(); }
};

// A pool with `workers` threads and a queue, like XLA's. It may report another
// `num_threads`, as XLA's does when several devices share one pool.
class QueuePool : public cpu::ThreadPool {
 public:
  explicit QueuePool(int64_t workers) : QueuePool(workers, workers) {}
  QueuePool(int64_t workers, int64_t num_threads) : num_threads_(num_threads) {
    for (int64_t i = 0; i < workers; ++i) {
      workers_.emplace_back([this] { Work(); });
    }
  }

  // Runs the closures that are still in the queue.
  ~QueuePool() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  int64_t num_threads() const override { return num_threads_; }

  void Schedule(std::function<void()> closure) override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(closure));
    }
    changed_.notify_one();
  }

 private:
  void Work() {
    for (;;) {
      std::function<void()> closure;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
        if (queue_.empty()) return;
        closure = std::move(queue_.front());
        queue_.pop_front();
      }
      closure();
    }
  }

  int64_t num_threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool closing_ = false;
  std::vector<std::thread> workers_;
};

}  // namespace testing
}  // namespace jax_bnar

#endif  // JAX_BNAR_TESTS_NATIVE_POOLS_H_
