#include "device.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace cuda_emulation {
namespace {

Schedule InitialSchedule() {
  Schedule schedule;
  if (const char* seed = std::getenv("JAX_BNAR_EMULATION_SEED")) {
    schedule.seed = std::strtoull(seed, nullptr, 10);
  }
  return schedule;
}

struct Settings {
  std::mutex mutex;
  Device device;
  Schedule schedule = InitialSchedule();
};

Settings& GetSettings() {
  static Settings settings;
  return settings;
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local char last_message[1024] = "";

}  // namespace

Device GetDevice() {
  Settings& settings = GetSettings();
  std::lock_guard<std::mutex> lock(settings.mutex);
  return settings.device;
}

void SetDevice(const Device& device) {
  Settings& settings = GetSettings();
  std::lock_guard<std::mutex> lock(settings.mutex);
  settings.device = device;
}

Schedule GetSchedule() {
  Settings& settings = GetSettings();
  std::lock_guard<std::mutex> lock(settings.mutex);
  return settings.schedule;
}

void SetSchedule(const Schedule& schedule) {
  Settings& settings = GetSettings();
  std::lock_guard<std::mutex> lock(settings.mutex);
  settings.schedule = schedule;
}

const char* LastMessage() { return last_message; }

void ClearMessage() { last_message[0] = '\0'; }

cudaError_t Return(cudaError_t error, const char* message) {
  if (error != cudaSuccess) {
    last_error = error;
    std::snprintf(last_message, sizeof(last_message), "%s", message);
  }
  return error;
}

cudaError_t ReturnError(cudaError_t error, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_message, sizeof(last_message), format, arguments);
  va_end(arguments);
  return last_error = error;
}

int BlocksPerSm(const Device& device, unsigned block_size,
                std::size_t shared_size) {
  // Registers and threads are allocated to whole warps.
  const int threads = static_cast<int>((block_size + 31) / 32 * 32);
  if (threads == 0) return 0;
  const auto shared = static_cast<long long>(shared_size) +
                      device.reserved_shared_memory_per_block;
  long long blocks =
      std::min(device.max_blocks_per_sm, device.max_threads_per_sm / threads);
  blocks =
      std::min<long long>(blocks, device.registers_per_sm /
                                      (threads * device.registers_per_thread));
  if (shared > 0)
    blocks = std::min(blocks, device.shared_memory_per_sm / shared);
  return static_cast<int>(blocks);
}

}  // namespace cuda_emulation

cudaError_t cudaPeekAtLastError() { return cuda_emulation::last_error; }

cudaError_t cudaGetLastError() {
  const cudaError_t error = cuda_emulation::last_error;
  cuda_emulation::last_error = cudaSuccess;
  return error;
}
