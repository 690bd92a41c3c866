#include "cpu/huge_pages.h"

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "cpu/fresh_memory.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace jax_bnar::cpu {
namespace {

std::string Setting() {
  const char* variable = std::getenv("JAX_BNAR_HUGE_PAGES");
  return variable == nullptr ? "" : variable;
}

#ifdef __linux__
// Empty where the kernel has no such setting. A wheel contains libstdc++, whose
// file streams need a newer glibc than the wheel promises, hence C's.
std::string KernelSetting(const char* name) {
  const std::string path =
      std::string("/sys/kernel/mm/transparent_hugepage/") + name;
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return "";
  char text[128];
  const size_t length = std::fread(text, 1, sizeof text, file);
  std::fclose(file);
  return std::string(text, length);
}
#endif

}  // namespace

bool UsesHugePages() {
#ifdef __linux__
  static const bool uses =
      Setting() != "0" &&
      KernelSetting("enabled").find("[madvise]") != std::string::npos &&
      std::atoll(KernelSetting("hpage_pmd_size").c_str()) == kHugePageBytes;
  return uses;
#else
  return false;
#endif
}

const std::string& WrongHugePages() {
  static const std::string wrong = [] {
    const std::string setting = Setting();
    if (setting.empty() || setting == "0" || setting == "1")
      return std::string();
    return "jax_bnar: the environment variable JAX_BNAR_HUGE_PAGES must be "
           "unset or one of '0', '1'; got '" +
           setting + "'.";
  }();
  return wrong;
}

void AdviseHugePages(void* array, int64_t bytes) {
  if (!WrongHugePages().empty()) throw std::invalid_argument(WrongHugePages());
  if (array == nullptr || bytes < kSmallestAdvisedBytes || !UsesHugePages()) {
    return;
  }
#ifdef __linux__
  // Only pages that lie within the array, so that no neighbour is affected and
  // no memory is used beyond the array.
  constexpr uintptr_t kPage = kHugePageBytes;
  const uintptr_t address = reinterpret_cast<uintptr_t>(array);
  const uintptr_t end =
      (address + static_cast<uintptr_t>(bytes)) / kPage * kPage;
  uintptr_t begin = (address + kPage - 1) / kPage * kPage;
  // Pages that are in memory already have taken their faults. Advice would only
  // have a kernel thread copy them into huge pages later, behind the user's
  // back.
  while (begin < end && !IsFresh(reinterpret_cast<const void*>(begin))) {
    begin += kPage;
  }
  if (begin == end) return;
  // It is advice: a kernel that refuses it gives small pages, as without it.
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jax_bnar::cpu
