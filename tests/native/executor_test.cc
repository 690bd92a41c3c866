// Tests Run() on pools that run closures late, never, at once, or from many
// threads. It is also meant for ThreadSanitizer: each phase reads what the
// previous one wrote, and only Run synchronises them.

#include "cpu/executor.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/native/pools.h"

namespace jax_bnar {
namespace testing {

using cpu::Phase;
using cpu::Run;
using cpu::ThreadPool;
namespace {

// The program is killed after this time, in case of a deadlock.
constexpr unsigned kMaxSeconds = 150;

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

// Keeps closures until RunKept is called.
class LatePool : public ThreadPool {
 public:
  explicit LatePool(int64_t num_threads) : num_threads_(num_threads) {}

  int64_t num_threads() const override { return num_threads_; }
  void Schedule(std::function<void()> closure) override {
    kept_.push_back(std::move(closure));
  }

  size_t size() const { return kept_.size(); }
  void RunKept() {
    for (const auto& closure : kept_) closure();
    kept_.clear();
  }

 private:
  int64_t num_threads_;
  std::vector<std::function<void()>> kept_;
};

// Runs closures inside Schedule.
class InlinePool : public ThreadPool {
 public:
  int64_t num_threads() const override { return 4; }
  void Schedule(std::function<void()> closure) override { closure(); }
};

// Starts a new thread for every closure.
class ThreadEach : public ThreadPool {
 public:
  explicit ThreadEach(int64_t num_threads) : num_threads_(num_threads) {}
  ~ThreadEach() override {
    for (std::thread& thread : threads_) thread.join();
  }

  int64_t num_threads() const override { return num_threads_; }
  void Schedule(std::function<void()> closure) override {
    threads_.emplace_back(std::move(closure));
  }

 private:
  int64_t num_threads_;
  std::vector<std::thread> threads_;
};

// Phases of tasks that depend on the whole previous phase: every task adds up
// all values of that phase and stores its own, with plain reads and writes.
class Chain {
 public:
  explicit Chain(std::vector<int64_t> sizes) : sizes_(std::move(sizes)) {
    for (const int64_t size : sizes_) {
      values_.emplace_back(static_cast<size_t>(size), 0);
    }
  }

  std::vector<Phase> Phases() {
    std::vector<Phase> phases;
    for (size_t p = 0; p < sizes_.size(); ++p) {
      phases.push_back({sizes_[p],
                        [this, p](int64_t task) {
                          int64_t sum = 1;
                          if (p > 0) {
                            for (const int64_t v : values_[p - 1]) sum += v;
                          }
                          // += so that a task that ran twice is detected.
                          values_[p][static_cast<size_t>(task)] += sum % kPrime;
                        },
                        /*last_first=*/p % 2 == 1});
    }
    return phases;
  }

  void Check() const {
    int64_t before = 0;
    for (const auto& values : values_) {
      int64_t sum = 0;
      for (const int64_t value : values) {
        Require(value == (1 + before) % kPrime,
                "every task ran once, after the previous phase");
        sum += value;
      }
      before = sum;
    }
  }

 private:
  static constexpr int64_t kPrime = 1'000'003;

  std::vector<int64_t> sizes_;
  std::vector<std::vector<int64_t>> values_;
};

const std::vector<std::vector<int64_t>>& ChainSizes() {
  static const std::vector<std::vector<int64_t>> sizes = {
      {}, {0}, {1}, {0, 3, 0, 0, 5, 0}, {7, 1, 64, 2}, {100, 3, 100}, {2, 2}};
  return sizes;
}

void RunChains(ThreadPool& pool, int64_t max_threads) {
  for (const auto& sizes : ChainSizes()) {
    Chain chain(sizes);
    Run(pool, max_threads, chain.Phases());
    chain.Check();
  }
}

void TestOrdinaryPools() {
  CallerOnly caller_only;
  InlinePool inline_pool;
  for (const int64_t max_threads : {1, 2, 3, 100}) {
    RunChains(caller_only, max_threads);
    RunChains(inline_pool, max_threads);
    for (const int64_t threads : {1, 2, 5}) {
      QueuePool queue(threads);
      ThreadEach each(threads);
      for (int i = 0; i < 20; ++i) {
        RunChains(queue, max_threads);
        RunChains(each, max_threads);
      }
    }
  }
}

void TestClosuresThatNeverRun() {
  LatePool pool(8);
  RunChains(pool, 8);
  Require(pool.size() > 0, "something was scheduled");
  // The closures hold the last references; LeakSanitizer checks their release.
}

void TestClosuresThatRunAfterTheCall() {
  LatePool pool(8);
  {
    Chain chain({20, 3, 20});
    Run(pool, 8, chain.Phases());
    chain.Check();
  }
  // The chain is destroyed, so closures must not run any task now.
  pool.RunKept();
  Run(pool, 8, Chain({}).Phases());
  {
    auto chain = std::make_unique<Chain>(std::vector<int64_t>{20, 3, 20});
    Run(pool, 8, chain->Phases());
    chain->Check();
    chain.reset();
    std::thread late([&pool] { pool.RunKept(); });
    late.join();
  }
}

// Runs the first closures in threads, and has no memory for further ones.
class FullPool : public ThreadEach {
 public:
  using ThreadEach::ThreadEach;
  void Schedule(std::function<void()> closure) override {
    if (++scheduled_ > 1) throw std::bad_alloc();
    ThreadEach::Schedule(std::move(closure));
  }

 private:
  int scheduled_ = 0;
};

void TestWithoutMemoryForClosures() {
  for (const auto& sizes : ChainSizes()) {
    FullPool pool(4);
    Chain chain(sizes);
    Run(pool, 4, chain.Phases());
    chain.Check();
  }
}

void TestOneThreadSchedulesNothing() {
  LatePool pool(8);
  Run(pool, 1, Chain({50, 50}).Phases());
  Require(pool.size() == 0, "one thread is the caller");
  Run(pool, 8, Chain({1, 1, 1}).Phases());
  Require(pool.size() == 0, "one task needs no second thread");
  Run(pool, 0, Chain({5}).Phases());
  Run(pool, 8, Chain({3, 2}).Phases());
  Require(pool.size() == 2, "no more threads than the widest phase has tasks");
}

// Each thread has a share of the tasks, but Run must not wait for threads that
// never come. Here the only helper is stuck until the first phase reaches a
// certain task.
void TestHelperThatArrivesInTheMiddle() {
  for (int i = 0; i < 50; ++i) {
    QueuePool pool(1, 4);
    std::atomic<bool> open{false};
    pool.Schedule([&open] {
      while (!open.load()) std::this_thread::yield();
    });
    std::vector<int64_t> first(40), second(40);
    Run(pool, 4,
        {{40,
          [&](int64_t task) {
            first[static_cast<size_t>(task)] = task;
            if (task == i % 40) open.store(true);
          }},
         {40,
          [&](int64_t task) {
            second[static_cast<size_t>(task)] =
                first[static_cast<size_t>(39 - task)];
          },
          true}});
    for (int64_t t = 0; t < 40; ++t) {
      Require(second[static_cast<size_t>(t)] == 39 - t, "phases in order");
    }
  }
}

// Several devices share one small pool: all workers are inside Run, and none is
// left for the closures.
void TestManyRunsOnOneSmallPool() {
  for (const int64_t workers : {1, 2, 3}) {
    QueuePool pool(workers, 8);
    constexpr int kRuns = 24;
    std::mutex mutex;
    std::condition_variable finished;
    int left = kRuns;
    std::vector<std::unique_ptr<Chain>> chains;
    for (int i = 0; i < kRuns; ++i) {
      chains.push_back(
          std::make_unique<Chain>(std::vector<int64_t>{16, 4, 16, 1}));
    }
    for (const auto& chain : chains) {
      pool.Schedule([&, chain = chain.get()] {
        Run(pool, 8, chain->Phases());
        const std::lock_guard<std::mutex> lock(mutex);
        if (--left == 0) finished.notify_all();
      });
    }
    {
      std::unique_lock<std::mutex> lock(mutex);
      finished.wait(lock, [&left] { return left == 0; });
    }
    for (const auto& chain : chains) chain->Check();
  }
}

// The same, called from threads that do not belong to the pool.
void TestManyCallers() {
  QueuePool pool(2, 6);
  std::vector<std::thread> callers;
  for (int i = 0; i < 6; ++i) {
    callers.emplace_back([&pool] {
      for (int repeat = 0; repeat < 40; ++repeat) {
        Chain chain({12, 5, 30});
        Run(pool, 6, chain.Phases());
        chain.Check();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// A task may itself call Run on the same pool.
void TestNestedRuns() {
  QueuePool pool(2);
  std::vector<std::unique_ptr<Chain>> chains;
  for (int i = 0; i < 10; ++i) {
    chains.push_back(std::make_unique<Chain>(std::vector<int64_t>{6, 6}));
  }
  Run(pool, 2, {{10, [&](int64_t task) {
                   Run(pool, 2, chains[static_cast<size_t>(task)]->Phases());
                 }}});
  for (const auto& chain : chains) chain->Check();
}

void TestOrderWithinAShare() {
  CallerOnly pool;
  std::vector<int64_t> order;
  const auto record = [&order](int64_t task) { order.push_back(task); };
  Run(pool, 1, {{3, record, false}, {3, record, true}});
  Require(order == std::vector<int64_t>{0, 1, 2, 2, 1, 0},
          "last_first reverses the order");
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main() {
  using namespace jax_bnar::testing;
  alarm(kMaxSeconds);
  TestOrdinaryPools();
  TestClosuresThatNeverRun();
  TestClosuresThatRunAfterTheCall();
  TestWithoutMemoryForClosures();
  TestOneThreadSchedulesNothing();
  TestHelperThatArrivesInTheMiddle();
  TestManyRunsOnOneSmallPool();
  TestManyCallers();
  TestNestedRuns();
  TestOrderWithinAShare();
  std::printf("passed\n");
  return 0;
}
