#include "cpu/dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace jax_bnar::cpu {

// CMake compiles cpu/isa/ once for each of these namespaces.
namespace baseline {
const TileKernels& Kernels(DType dtype, DType out_dtype);
}
#if defined(__x86_64__)
namespace avx2 {
const TileKernels& Kernels(DType dtype, DType out_dtype);
}
namespace avx512 {
const TileKernels& Kernels(DType dtype, DType out_dtype);
}
namespace avx512bf16 {
const TileKernels& Kernels(DType dtype, DType out_dtype);
}
#elif defined(__aarch64__)
namespace neonbf16 {
const TileKernels& Kernels(DType dtype, DType out_dtype);
}
#endif

namespace {

// The dtypes that a set has kernels of. Those of bfloat16 alone are for
// processors that also have the next set, which is the same for other dtypes.
enum class Dtypes { kAll, kBFloat16 };

struct Isa {
  const char* name;
  bool supported;
  Dtypes dtypes;
  const TileKernels& (*kernels)(DType, DType);
};

#if defined(__x86_64__)
bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") &&
         __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#elif defined(__aarch64__)
// Whether NEON converts float to bfloat16 (FEAT_BF16: Neoverse N2 and V1, Apple
// M2, and later ones).
bool HasNeonBFloat16() {
#if defined(__linux__)
  // HWCAP2_BF16, which the headers of older systems lack.
  constexpr unsigned long kBFloat16 = 1ul << 14;
  return (getauxval(AT_HWCAP2) & kBFloat16) != 0;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof(has);
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) ==
             0 &&
         has != 0;
#else
  return false;
#endif
}
#endif

// The instruction sets, best first. The last one runs everywhere.
const std::vector<Isa>& All() {
  static const std::vector<Isa> all = {
#if defined(__x86_64__)
      {"avx512bf16", HasAvx512() && __builtin_cpu_supports("avx512bf16") != 0,
       Dtypes::kBFloat16, avx512bf16::Kernels},
      {"avx512", HasAvx512(), Dtypes::kAll, avx512::Kernels},
      // Every processor with AVX2 has F16C, and GCC 12 cannot test for it.
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
       Dtypes::kAll, avx2::Kernels},
#elif defined(__aarch64__)
      {"neonbf16", HasNeonBFloat16(), Dtypes::kBFloat16, neonbf16::Kernels},
#endif
      {"baseline", true, Dtypes::kAll, baseline::Kernels},
  };
  return all;
}

// The quoted names of all instruction sets, or of those that the processor
// supports.
std::string Names(bool supported_only) {
  std::string names;
  for (const Isa& isa : All()) {
    if (supported_only && !isa.supported) continue;
    if (!names.empty()) names += ", ";
    names += std::string("'") + isa.name + "'";
  }
  return names;
}

struct Choice {
  const Isa* isa;     // the best one if the variable is wrong
  std::string wrong;  // what is wrong, or empty
};

Choice Choose() {
  Choice choice{nullptr, ""};
  for (const Isa& isa : All()) {
    if (isa.supported && choice.isa == nullptr) choice.isa = &isa;
  }
  const char* variable = std::getenv("JAX_BNAR_CPU_ISA");
  const std::string wanted = variable == nullptr ? "" : variable;
  if (wanted.empty()) return choice;
  for (const Isa& isa : All()) {
    if (isa.supported && wanted == isa.name) return {&isa, ""};
  }
  choice.wrong =
      "jax_bnar: the environment variable JAX_BNAR_CPU_ISA must be unset or "
      "one of " +
      Names(/*supported_only=*/false) + ", of which this processor runs " +
      Names(/*supported_only=*/true) + "; got '" + wanted + "'.";
  return choice;
}

const Choice& Chosen() {
  static const Choice choice = Choose();
  return choice;
}

}  // namespace

const TileKernels& KernelsFor(DType dtype, DType out_dtype) {
  if (!WrongIsa().empty()) throw std::invalid_argument(WrongIsa());
  const Isa* isa = Chosen().isa;
  if (isa->dtypes == Dtypes::kBFloat16 && dtype != DType::kBFloat16) ++isa;
  return isa->kernels(dtype, out_dtype);
}

const char* IsaName() { return Chosen().isa->name; }

const std::string& WrongIsa() { return Chosen().wrong; }

}  // namespace jax_bnar::cpu
