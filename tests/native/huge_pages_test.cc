// Tests AdviseHugePages and IsFresh on memory fresh from mmap. The argument
// says what JAX_BNAR_HUGE_PAGES should lead to: "on", "off" or "refused".

#include "cpu/huge_pages.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/fresh_memory.h"

#ifdef __linux__
#include <sys/mman.h>

#include <fstream>
#endif

namespace jax_bnar {
namespace testing {
namespace {

using cpu::AdviseHugePages;
using cpu::IsFresh;
using cpu::kHugePageBytes;
using cpu::kSmallestAdvisedBytes;

// What ctest takes for a skipped test.
constexpr int kSkipped = 77;

void Require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::exit(1);
}

void TestRefused() {
  Require(cpu::WrongHugePages().find("'0', '1'; got") != std::string::npos,
          "the message names the values");
  try {
    AdviseHugePages(nullptr, 0);
  } catch (const std::invalid_argument& error) {
    Require(error.what() == cpu::WrongHugePages(), "the same message");
    return;
  }
  Require(false, "a wrong value is refused whatever the array");
}

#ifdef __linux__

// Eight huge pages of memory that nothing has touched, between two that nobody
// may touch, so that the kernel cannot join them to another mapping.
class Fresh {
 public:
  static constexpr int64_t kBytes = 8 * kHugePageBytes;

  Fresh()
      : mapping_(static_cast<char*>(mmap(nullptr, kMapped, PROT_NONE,
                                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    Require(mapping_ != MAP_FAILED, "mmap");
    const uintptr_t after = reinterpret_cast<uintptr_t>(mapping_);
    data_ = mapping_ + (kHugePageBytes - after % kHugePageBytes);
    Require(mprotect(data_, kBytes, PROT_READ | PROT_WRITE) == 0, "mprotect");
  }
  ~Fresh() { munmap(mapping_, kMapped); }
  Fresh(const Fresh&) = delete;
  Fresh& operator=(const Fresh&) = delete;

  char* data() { return data_; }

  // For each huge page from the first to the last, '1' if it is advised.
  std::string Advised() const {
    std::string advised;
    for (int64_t page = 0; page < kBytes; page += kHugePageBytes) {
      advised += HasFlag(data_ + page) ? '1' : '0';
    }
    return advised;
  }

 private:
  static constexpr int64_t kMapped = kBytes + 2 * kHugePageBytes;

  // Whether MADV_HUGEPAGE was set on the mapping that holds an address.
  static bool HasFlag(const char* at) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(at);
    std::ifstream smaps("/proc/self/smaps");
    std::string line;
    bool here = false;
    while (std::getline(smaps, line)) {
      unsigned long long begin, end;
      if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2) {
        here = begin <= address && address < end;
      }
      if (here && line.rfind("VmFlags:", 0) == 0) {
        return line.find(" hg") != std::string::npos;
      }
    }
    return false;
  }

  char* mapping_;
  char* data_;
};

void RequireAdvised(const Fresh& fresh, const char* expected,
                    const char* what) {
  const std::string advised = fresh.Advised();
  Require(advised == expected, std::string(what) + ": advised " + advised +
                                   ", expected " + expected);
}

void TestFresh() {
  Fresh fresh;
  char* page = fresh.data() + 3 * kHugePageBytes;
  char* within = page + 1234;
  Require(IsFresh(page) && IsFresh(within), "nothing has touched it");
  *within = 1;
  Require(!IsFresh(page) && !IsFresh(within), "it has been written");
  Require(IsFresh(fresh.data()), "a page that is not near");
  Require(!IsFresh(nullptr), "nothing is mapped there");
}

void TestOff() {
  Fresh fresh;
  AdviseHugePages(fresh.data(), Fresh::kBytes);
  RequireAdvised(fresh, "00000000", "off");
}

void TestOn() {
  {
    Fresh fresh;
    AdviseHugePages(fresh.data(), Fresh::kBytes);
    RequireAdvised(fresh, "11111111", "a whole mapping");
  }
  {
    Fresh fresh;
    AdviseHugePages(fresh.data() + 4096, Fresh::kBytes - 2 * 4096);
    RequireAdvised(fresh, "01111110", "pages that are not whole");
  }
  {
    Fresh fresh;
    AdviseHugePages(fresh.data(), kSmallestAdvisedBytes - 1);
    RequireAdvised(fresh, "00000000", "a small array");
    AdviseHugePages(fresh.data(), kSmallestAdvisedBytes);
    RequireAdvised(fresh, "11000000", "the smallest array");
  }
  {
    Fresh fresh;
    fresh.data()[0] = 1;
    fresh.data()[kHugePageBytes] = 1;
    AdviseHugePages(fresh.data(), Fresh::kBytes);
    RequireAdvised(fresh, "00111111", "what is in memory at the beginning");
  }
  {
    Fresh fresh;
    for (int64_t i = 0; i < Fresh::kBytes; i += 4096) fresh.data()[i] = 1;
    AdviseHugePages(fresh.data(), Fresh::kBytes);
    RequireAdvised(fresh, "00000000", "memory in use");
  }
  AdviseHugePages(nullptr, Fresh::kBytes);
  // Nothing is mapped at the first huge pages of the address space.
  AdviseHugePages(reinterpret_cast<void*>(kHugePageBytes), Fresh::kBytes);
}

#endif

int Main(const std::string& expected) {
  if (expected == "refused") {
    TestRefused();
    return 0;
  }
  Require(cpu::WrongHugePages().empty(), "the value is valid");
#ifdef __linux__
  TestFresh();
  if (expected == "off") {
    Require(!cpu::UsesHugePages(), "off");
    TestOff();
    return 0;
  }
  if (cpu::UsesHugePages()) {
    TestOn();
    return 0;
  }
#endif
  std::puts("this machine has no huge pages on request");
  return kSkipped;
}

}  // namespace
}  // namespace testing
}  // namespace jax_bnar

int main(int, char** argv) { return jax_bnar::testing::Main(argv[1]); }
