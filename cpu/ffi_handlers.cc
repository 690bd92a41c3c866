#include "cpu/ffi_handlers.h"

#include <functional>
#include <utility>

#include "cpu/executor.h"
#include "cpu/operations.h"
#include "native/ffi_targets.h"

namespace jax_bnar::cpu {
namespace {

namespace ffi = xla::ffi;

class XlaThreadPool : public ThreadPool {
 public:
  explicit XlaThreadPool(ffi::ThreadPool& pool) : pool_(pool) {}

  int64_t num_threads() const override { return pool_.num_threads(); }
  void Schedule(std::function<void()> closure) override {
    pool_.Schedule(std::move(closure));
  }

 private:
  ffi::ThreadPool& pool_;
};

class CpuBackend {
 public:
  using Native = ffi::ThreadPool;
  static constexpr bool kTakesMaskChannels = false;
  static constexpr bool kTakesFloat32Outputs = true;

  explicit CpuBackend(ffi::ThreadPool& pool) : pool_(pool) {}

  // There is no workspace to read: the operations allocate the little memory
  // that they need.
  void ReadWorkspace(FfiCall&, int) {}

  // Defines Forward, Backward and so on, as calls of the functions of these
  // names in cpu/operations.h.
#define BNAR_RUN_ON_POOL(name, ...)      \
  template <typename... Args>            \
  ffi::Error name(const Args&... args) { \
    cpu::name(pool_, args...);           \
    return ffi::Error::Success();        \
  }
  BNAR_FOR_EACH_OPERATION(BNAR_RUN_ON_POOL)
#undef BNAR_RUN_ON_POOL

 private:
  XlaThreadPool pool_;
};

}  // namespace

BNAR_DEFINE_HANDLERS(Handler, CpuBackend,
                     ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())

}  // namespace jax_bnar::cpu
