#include "compute/cuda_driver.h"

#include <dlfcn.h>

#include <stdexcept>

namespace quire {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

/// Sets `function` to the driver's function `name`.
template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr)
    throw std::runtime_error(std::string(kLibrary) + " has no function " + name + "; a newer driver is needed");
}

}  // namespace

const CudaDriver& CudaDriver::get() {
  static const CudaDriver driver;
  return driver;
}

CudaDriver::CudaDriver() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    throw std::runtime_error(std::string(kLibrary) +
                             ", which comes with the driver of NVIDIA's GPUs, can't be loaded: " + dlerror());
  find(library, "cuDeviceGetCount", device_count);
  find(library, "cuDeviceGet", device_get);
  find(library, "cuDeviceGetName", device_name);
  find(library, "cuDeviceGetAttribute", device_attribute);
  find(library, "cuDevicePrimaryCtxRetain", context_retain);
  find(library, "cuDevicePrimaryCtxRelease_v2", context_release);
  find(library, "cuCtxSetCurrent", context_set_current);
  find(library, "cuMemGetInfo_v2", memory_info);
  find(library, "cuMemAllocManaged", allocate_managed);
  find(library, "cuMemFree_v2", free);
  find(library, "cuMemsetD8_v2", clear);
  find(library, "cuModuleLoadData", module_load);
  find(library, "cuModuleUnload", module_unload);
  find(library, "cuModuleGetFunction", module_function);
  find(library, "cuLaunchKernel", launch);
  find(library, "cuCtxSynchronize", synchronize);
  find(library, "cuGetErrorName", error_name_);
  find(library, "cuGetErrorString", error_text_);
  Result (*start)(unsigned flags);
  find(library, "cuInit", start);
  check(start(0), "start the driver");
}

void CudaDriver::check(Result result, const char* what) const {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  error_name_(result, &name);
  error_text_(result, &text);
  throw std::runtime_error(std::string("the GPU failed to ") + what + ": " + (name == nullptr ? "unknown" : name) +
                           (text == nullptr ? "" : std::string(", ") + text));
}

}  // namespace quire
