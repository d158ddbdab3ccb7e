#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace quire {

/// An error of a GPU after which nothing in this process can use it.
class DeviceLost final : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// NVIDIA's driver: functions of libcuda.so.1, which is looked for when one is first needed. No toolkit is used.
///
/// Types and values are those of cuda.h, whose interface stays compatible.
class CudaDriver {
 public:
  using Device = int;
  using Pointer = unsigned long long;
  using Handle = void*;  ///< a context, module, function, stream, graph or linker
  using Result = int;

  enum Attribute {
    kMultiprocessors = 16,
    kThreadsOfMultiprocessor = 39,
    kUnifiedAddressing = 41,
    kMajor = 75,
    kMinor = 76,
    kConcurrentManagedAccess = 89
  };
  enum FunctionAttribute { kLocalBytes = 3, kMostSharedBytes = 8 };
  enum Advice { kPreferredLocation = 3, kAccessedBy = 5 };
  static constexpr Device kHost = -1;  ///< the host, as a place of managed memory
  static constexpr Result kOutOfMemory = 2;

  /// Returns the driver. Throws std::runtime_error, with the reason, where there is none that can be used.
  static const CudaDriver& get();

  /// Throws DeviceLost or another std::runtime_error if a call has failed; `what` says what was tried.
  void check(Result result, const char* what) const;

  /// Returns true if it has the functions of graphs, which old drivers lack.
  bool has_graphs() const;

  Result (*driver_version)(int*);
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
  Result (*allocate_host)(void**, std::size_t, unsigned flags);
  Result (*free_host)(void*);
  Result (*advise)(Pointer, std::size_t, Advice, Device);
  Result (*prefetch)(Pointer, std::size_t, Device, Handle stream);
  Result (*clear)(Pointer, unsigned char value, std::size_t width, Handle stream);
  Result (*clear_2d)(Pointer, std::size_t pitch, unsigned char value, std::size_t width, std::size_t height,
                     Handle stream);
  Result (*copy_within)(Pointer to, Pointer from, std::size_t, Handle stream);
  Result (*copy_to)(Pointer to, const void* from, std::size_t, Handle stream);
  Result (*copy_from)(void* to, Pointer from, std::size_t, Handle stream);
  Result (*link_create)(unsigned num_options, int* options, void** values, Handle* linker);
  Result (*link_add)(Handle linker, int type, void* data, std::size_t, const char* name, unsigned num_options,
                     int* options, void** values);
  Result (*link_complete)(Handle linker, void** cubin, std::size_t* size);
  Result (*link_destroy)(Handle linker);
  Result (*module_load)(Handle*, const void* image);
  Result (*module_unload)(Handle);
  Result (*module_function)(Handle*, Handle module, const char* name);
  Result (*function_get)(int*, FunctionAttribute, Handle function);
  Result (*function_set)(Handle function, FunctionAttribute, int value);
  Result (*launch)(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream, void** parameters,
                   void** extra);
  Result (*stream_create)(Handle*, unsigned flags);
  Result (*stream_destroy)(Handle);
  Result (*stream_synchronize)(Handle);
  Result (*capture_begin)(Handle stream, int mode);
  Result (*capture_end)(Handle stream, Handle* graph);
  Result (*graph_instantiate)(Handle*, Handle graph, unsigned long long flags);
  Result (*graph_launch)(Handle, Handle stream);
  Result (*graph_destroy)(Handle graph);
  Result (*graph_exec_destroy)(Handle);

 private:
  CudaDriver();

  Result (*error_name_)(Result, const char**);
  Result (*error_text_)(Result, const char**);
};

}  // namespace quire
