#include "cpu/dispatch.h"

#include <cstdlib>
#include <cstring>

namespace jax_bnar {

// One of these for each time that CMake compiles tile_kernels.cc.
namespace baseline {
const TileKernels& Kernels(DType dtype);
}
#if defined(__x86_64__)
namespace avx2 {
const TileKernels& Kernels(DType dtype);
}
namespace avx512 {
const TileKernels& Kernels(DType dtype);
}
namespace avx512bf16 {
const TileKernels& Kernels(DType dtype);
}
#endif

namespace {

struct Isa {
  const char* name;
  bool supported;
  const TileKernels& (*kernels)(DType);
};

#if defined(__x86_64__)
bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

const Isa& Chosen() {
  static const Isa& chosen = []() -> const Isa& {
    // Best first.
    static const Isa all[] = {
#if defined(__x86_64__)
        {"avx512bf16", HasAvx512() && __builtin_cpu_supports("avx512bf16") != 0,
         avx512bf16::Kernels},
        {"avx512", HasAvx512(), avx512::Kernels},
        // Every processor with AVX2 has F16C; GCC 12 cannot ask for it.
        {"avx2",
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
         avx2::Kernels},
#endif
        {"baseline", true, baseline::Kernels},
    };
    const char* wanted = std::getenv("JAX_BNAR_CPU_ISA");
    const Isa* best = nullptr;
    for (const Isa& isa : all) {
      if (!isa.supported) continue;
      if (best == nullptr) best = &isa;
      if (wanted != nullptr && std::strcmp(wanted, isa.name) == 0) return isa;
    }
    return *best;
  }();
  return chosen;
}

}  // namespace

const TileKernels& KernelsFor(DType dtype) { return Chosen().kernels(dtype); }

const char* IsaName() { return Chosen().name; }

}  // namespace jax_bnar
