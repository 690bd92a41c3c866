// cp.async: copies to shared memory that go on until a thread waits for them.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "scheduler.h"

namespace cuda_emulation {

void StartCopy(void* shared, const void* global, std::size_t size) {
  Thread* thread = current;
  SharedMemory& memory = thread->block->shared;
  auto* to = static_cast<unsigned char*>(shared);
  const auto* from = static_cast<const unsigned char*>(global);
  if ((size != 4 && size != 8 && size != 16) ||
      reinterpret_cast<std::uintptr_t>(to) % size != 0 ||
      reinterpret_cast<std::uintptr_t>(from) % size != 0) {
    Fail("a copy of %zu bytes from %p to %p", size, global, shared);
  }
  if (to < memory.data() || to + size > memory.data() + memory.size()) {
    Fail("a copy to %p, which is outside of the block's shared memory", shared);
  }
  for (const Copy& other : thread->copies) {
    if (to < other.to + other.size && other.to < to + size) {
      Fail("two copies of a thread to %p are under way", shared);
    }
  }
  FillWithPoison(to, size);
  Copy copy{to, from, size, thread->copy_groups, {}};
  std::memcpy(copy.was, from, size);
  thread->copies.push_back(copy);
}

void CloseCopies() { ++current->copy_groups; }

void WaitForCopies(std::uint64_t groups) {
  Thread* thread = current;
  auto& copies = thread->copies;
  const auto under_way =
      std::find_if(copies.begin(), copies.end(), [&](const Copy& copy) {
        return copy.group + groups >= thread->copy_groups;
      });
  std::for_each(copies.begin(), under_way, [](const Copy& copy) {
    if (std::memcmp(copy.was, copy.from, copy.size) != 0) {
      Fail("%p has changed while a copy of it was under way", copy.from);
    }
    std::memcpy(copy.to, copy.from, copy.size);
  });
  copies.erase(copies.begin(), under_way);
}

}  // namespace cuda_emulation
