#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace quire {

/// NVIDIA's driver: functions of libcuda.so.1, which is looked for when one is first needed. No toolkit is used.
///
/// Types and values are those of cuda.h, whose interface stays compatible.
class CudaDriver {
 public:
  using Device = int;
  using Pointer = unsigned long long;
  using Handle = void*;  ///< a context, module, function or stream
  using Result = int;

  enum Attribute { kMultiprocessors = 16, kMajor = 75, kMinor = 76, kConcurrentManagedAccess = 89 };

  /// Returns the driver. Throws std::runtime_error, with the reason, where there is none that can be used.
  static const CudaDriver& get();

  /// Throws std::runtime_error if a call has failed; `what` says what was tried.
  void check(Result result, const char* what) const;

  Result (*device_count)(int*);
  Result (*device_get)(Device*, int ordinal);
  Result (*device_name)(char*, int size, Device);
  Result (*device_attribute)(int*, Attribute, Device);
  Result (*context_retain)(Handle*, Device);
  Result (*context_release)(Device);
  Result (*context_set_current)(Handle);
  Result (*memory_info)(std::size_t* free, std::size_t* total);
  Result (*allocate_managed)(Pointer*, std::size_t, unsigned flags);
  Result (*free)(Pointer);
  Result (*clear)(Pointer, unsigned char value, std::size_t count);
  Result (*module_load)(Handle*, const void* image);
  Result (*module_unload)(Handle);
  Result (*module_function)(Handle*, Handle module, const char* name);
  Result (*launch)(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream, void** parameters,
                   void** extra);
  Result (*synchronize)();

 private:
  CudaDriver();

  Result (*error_name_)(Result, const char**);
  Result (*error_text_)(Result, const char**);
};

}  // namespace quire
