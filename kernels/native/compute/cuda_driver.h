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
    kMemoryPools = 115
  };
  enum FunctionAttribute { kLocalBytes = 3, kMostSharedBytes = 8 };
  enum PoolAttribute { kReleaseThreshold = 4, kReservedBytes = 5, kUsedBytes = 7 };  // each a std::uint64_t

  /// CUDA_MEMCPY2D: a copy of `height` rows of `width` bytes. The driver knows from an address whose memory it is.
  struct Copy2d {
    struct Side {
      std::size_t x = 0, y = 0;
      int memory_type = 4;  // CU_MEMORYTYPE_UNIFIED
      const void* host = nullptr;
      Pointer address;
      Handle array = nullptr;
      std::size_t pitch;
    };
    Side from, to;
    std::size_t width, height;
  };
  static constexpr Result kInvalidValue = 1, kOutOfMemory = 2;

  /// Returns the driver. Throws std::runtime_error, with the reason, where there is none that can be used.
  static const CudaDriver& get();

  /// Throws DeviceLost or another std::runtime_error if a call has failed; `what` says what was tried.
  void check(Result result, const char* what) const;

  /// Return true if it has the functions of graphs, or of memory pools, which old drivers lack.
  bool has_graphs() const;
  bool has_pools() const;

  Result (*driver_version)(int*);
  Result (*device_count)(int*);
  Result (*device_get)(Device*, int ordinal);
  Result (*device_name)(char*, int size, Device);
  Result (*device_attribute)(int*, Attribute, Device);
  Result (*context_retain)(Handle*, Device);
  Result (*context_release)(Device);
  Result (*context_set_current)(Handle);
  Result (*memory_info)(std::size_t* free, std::size_t* total);
  Result (*allocate)(Pointer*, std::size_t);
  Result (*free)(Pointer);
  Result (*default_pool)(Handle*, Device);
  Result (*pool_get)(Handle pool, PoolAttribute, void* value);
  Result (*pool_set)(Handle pool, PoolAttribute, void* value);
  Result (*pool_trim)(Handle pool, std::size_t bytes_to_keep);
  Result (*allocate_async)(Pointer*, std::size_t, Handle stream);
  Result (*free_async)(Pointer, Handle stream);
  Result (*allocate_host)(void**, std::size_t, unsigned flags);
  Result (*free_host)(void*);
  Result (*clear)(Pointer, unsigned char value, std::size_t width, Handle stream);
  Result (*clear_2d)(Pointer, std::size_t pitch, unsigned char value, std::size_t width, std::size_t height,
                     Handle stream);
  Result (*copy_to)(Pointer to, const void* from, std::size_t, Handle stream);
  Result (*copy)(Pointer to, Pointer from, std::size_t, Handle stream);  ///< the driver knows whose memory both are
  Result (*copy_2d)(const Copy2d*, Handle stream);
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
