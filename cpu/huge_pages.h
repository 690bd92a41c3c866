// Huge pages for results in fresh memory.

#ifndef JAX_BNAR_CPU_HUGE_PAGES_H_
#define JAX_BNAR_CPU_HUGE_PAGES_H_

#include <cstdint>
#include <string>

namespace jax_bnar::cpu {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
// Smaller arrays may not contain a whole huge page, or cost few page faults.
constexpr int64_t kSmallestAdvisedBytes = 2 * kHugePageBytes;

// Asks Linux for huge pages behind a result that is about to be written. The
// kernel zeroes freshly mapped memory page by page as it is first touched; in
// pages of 4 KiB, the faults take longer than our arithmetic.
//
// It asks for the whole huge pages within the array, from the first that is not
// in memory yet. It does nothing if `array` is null or has fewer than
// kSmallestAdvisedBytes, if UsesHugePages() is false, or where the kernel
// refuses.
// Throws std::invalid_argument if WrongHugePages() is not empty.
void AdviseHugePages(void* array, int64_t bytes);

// Whether this Linux gives huge pages of kHugePageBytes to memory that asks for
// them, and the environment variable JAX_BNAR_HUGE_PAGES, which is read once,
// is not "0". Where Linux gives them to all memory, nobody needs to ask.
bool UsesHugePages();

// A sentence that says what is wrong with JAX_BNAR_HUGE_PAGES, or an empty
// string. It must be unset, empty, "0" or "1".
const std::string& WrongHugePages();

}  // namespace jax_bnar::cpu

#endif  // JAX_BNAR_CPU_HUGE_PAGES_H_
