// A stand-in for the NVIDIA driver, compiled to libcuda.so.1. It answers what
// two variables of the environment say: STAND_IN_CUDA is the CUDA that the
// driver supports (13000 for 13.0), and STAND_IN_GPUS lists the compute
// capabilities of the GPUs ("7.5 9.0"); without any, it starts as the driver
// does where there is no GPU. It prints a line when it is initialised.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int kSuccess = 0;
constexpr int kNotInitialised = 3;
constexpr int kNoDevice = 100;
constexpr int kInvalidDevice = 101;
constexpr int kComputeCapabilityMajor = 75;
constexpr int kComputeCapabilityMinor = 76;

bool initialised = false;

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

struct Capability {
  int major, minor;
};

std::vector<Capability> Devices() {
  std::vector<Capability> devices;
  const std::string list = Variable("STAND_IN_GPUS");
  const char* rest = list.c_str();
  Capability capability;
  for (int read; std::sscanf(rest, "%d.%d%n", &capability.major,
                             &capability.minor, &read) == 2;
       rest += read) {
    devices.push_back(capability);
  }
  return devices;
}

}  // namespace

extern "C" {

int cuDriverGetVersion(int* version) {
  *version = std::atoi(Variable("STAND_IN_CUDA").c_str());
  return kSuccess;
}

int cuInit(unsigned) {
  std::puts("the driver was initialised");
  std::fflush(stdout);
  initialised = !Devices().empty();
  return initialised ? kSuccess : kNoDevice;
}

int cuDeviceGetCount(int* count) {
  if (!initialised) return kNotInitialised;
  *count = static_cast<int>(Devices().size());
  return kSuccess;
}

int cuDeviceGet(int* device, int ordinal) {
  if (!initialised) return kNotInitialised;
  if (ordinal >= static_cast<int>(Devices().size())) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

int cuDeviceGetName(char* name, int bytes, int device) {
  std::snprintf(name, static_cast<size_t>(bytes), "Stand-in GPU %d", device);
  return kSuccess;
}

int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const Capability capability = Devices()[static_cast<size_t>(device)];
  if (attribute == kComputeCapabilityMajor) {
    *value = capability.major;
  } else if (attribute == kComputeCapabilityMinor) {
    *value = capability.minor;
  } else {
    return kInvalidDevice;
  }
  return kSuccess;
}

}  // extern "C"
