#include "compute/cuda_driver.h"

#include <dlfcn.h>

#include <algorithm>

namespace quire {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

/// Sets `function` to the driver's function `name`, nullptr if it has none.
template <class Function>
void look_for(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

template <class Function>
void find(void* library, const char* name, Function& function) {
  look_for(library, name, function);
  if (function == nullptr)
    throw std::runtime_error(std::string(kLibrary) + " has no function " + name + "; a newer driver is needed");
}

/// Returns true for the errors that no later call recovers from: of a driver, a GPU or a context that is gone, of
/// memory or a link that fails, of an access or a launch, but for one that asks for too much.
bool loses_device(CudaDriver::Result result) {
  constexpr CudaDriver::Result kSingle[] = {4, 46, 201, 214, 220, 226, 999}, kFirst = 700, kTooMuch = 701, kLast = 719;
  return std::ranges::find(kSingle, result) != std::end(kSingle) ||
         (result >= kFirst && result <= kLast && result != kTooMuch);
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
  find(library, "cuDriverGetVersion", driver_version);
  find(library, "cuDeviceGetCount", device_count);
  find(library, "cuDeviceGet", device_get);
  find(library, "cuDeviceGetName", device_name);
  find(library, "cuDeviceGetAttribute", device_attribute);
  find(library, "cuDevicePrimaryCtxRetain", context_retain);
  find(library, "cuDevicePrimaryCtxRelease_v2", context_release);
  find(library, "cuCtxSetCurrent", context_set_current);
  find(library, "cuMemGetInfo_v2", memory_info);
  find(library, "cuMemAlloc_v2", allocate);
  find(library, "cuMemFree_v2", free);
  look_for(library, "cuDeviceGetDefaultMemPool", default_pool);
  look_for(library, "cuMemPoolGetAttribute", pool_get);
  look_for(library, "cuMemPoolSetAttribute", pool_set);
  look_for(library, "cuMemPoolTrimTo", pool_trim);
  look_for(library, "cuMemAllocAsync", allocate_async);
  look_for(library, "cuMemFreeAsync", free_async);
  find(library, "cuMemHostAlloc", allocate_host);
  find(library, "cuMemFreeHost", free_host);
  find(library, "cuMemsetD8Async", clear);
  find(library, "cuMemsetD2D8Async", clear_2d);
  find(library, "cuMemcpyHtoDAsync_v2", copy_to);
  find(library, "cuMemcpyAsync", copy);
  find(library, "cuMemcpy2DAsync_v2", copy_2d);
  find(library, "cuLinkCreate_v2", link_create);
  find(library, "cuLinkAddData_v2", link_add);
  find(library, "cuLinkComplete", link_complete);
  find(library, "cuLinkDestroy", link_destroy);
  find(library, "cuModuleLoadData", module_load);
  find(library, "cuModuleUnload", module_unload);
  find(library, "cuModuleGetFunction", module_function);
  find(library, "cuFuncGetAttribute", function_get);
  find(library, "cuFuncSetAttribute", function_set);
  find(library, "cuLaunchKernel", launch);
  find(library, "cuStreamCreate", stream_create);
  find(library, "cuStreamDestroy_v2", stream_destroy);
  find(library, "cuStreamSynchronize", stream_synchronize);
  look_for(library, "cuStreamBeginCapture_v2", capture_begin);
  look_for(library, "cuStreamEndCapture", capture_end);
  look_for(library, "cuGraphInstantiateWithFlags", graph_instantiate);
  look_for(library, "cuGraphLaunch", graph_launch);
  look_for(library, "cuGraphDestroy", graph_destroy);
  look_for(library, "cuGraphExecDestroy", graph_exec_destroy);
  find(library, "cuGetErrorName", error_name_);
  find(library, "cuGetErrorString", error_text_);
  Result (*start)(unsigned flags);
  find(library, "cuInit", start);
  check(start(0), "start the driver");
}

bool CudaDriver::has_graphs() const {
  return capture_begin && capture_end && graph_instantiate && graph_launch && graph_destroy && graph_exec_destroy;
}

bool CudaDriver::has_pools() const {
  return default_pool && pool_get && pool_set && pool_trim && allocate_async && free_async;
}

void CudaDriver::check(Result result, const char* what) const {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  error_name_(result, &name);
  error_text_(result, &text);
  const std::string message = std::string("the GPU failed to ") + what + ": " + (name == nullptr ? "unknown" : name) +
                              (text == nullptr ? "" : std::string(", ") + text);
  if (loses_device(result)) throw DeviceLost(message);
  throw std::runtime_error(message);
}

}  // namespace quire
