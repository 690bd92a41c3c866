#include "cpu/ffi_handlers.h"

#include <exception>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
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
#define BNAR_RUN_ON_POOL(name, ...)                    \
  template <typename... Args>                          \
  ffi::Error name(const Args&... args) {               \
    return Caught([&] { cpu::name(pool_, args...); }); \
  }
  BNAR_FOR_EACH_OPERATION(BNAR_RUN_ON_POOL)
#undef BNAR_RUN_ON_POOL

 private:
  // Turns exceptions into errors, because none may leave a handler.
  template <typename F>
  static ffi::Error Caught(F f) {
    try {
      f();
    } catch (const std::bad_alloc&) {
      return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                        "jax_bnar: not enough memory for per-channel sums");
    } catch (const std::invalid_argument& e) {
      return ffi::Error::InvalidArgument(e.what());
    } catch (const std::exception& e) {
      return ffi::Error::Internal(std::string("jax_bnar: ") + e.what());
    }
    return ffi::Error::Success();
  }

  XlaThreadPool pool_;
};

}  // namespace

BNAR_DEFINE_HANDLERS(Handler, CpuBackend,
                     ffi::Ffi::Bind().Ctx<ffi::ThreadPool>())

}  // namespace jax_bnar::cpu
