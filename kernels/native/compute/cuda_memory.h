#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "compute/cuda_driver.h"
#include "compute/device.h"

namespace quire {

/// The current context of a GPU, which it keeps open. Calls of the driver need it on each thread that makes them.
class CudaContext {
 public:
  CudaContext(const CudaDriver& driver, CudaDriver::Device device);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  void use() const { driver_.check(driver_.context_set_current(context_), "use the GPU"); }

  /// Does the same where nothing can be done about an error: at the end.
  void use_if_there() const noexcept { driver_.context_set_current(context_); }

 private:
  const CudaDriver& driver_;
  CudaDriver::Device device_;
  CudaDriver::Handle context_ = nullptr;
};

/// Work of a GPU that is done in the order in which it was given.
class CudaStream {
 public:
  CudaStream(const CudaDriver& driver, const CudaContext& context);
  ~CudaStream();
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  CudaDriver::Handle handle() const { return stream_; }
  void synchronize(const char* what) const { driver_.check(driver_.stream_synchronize(stream_), what); }

  /// Does the same where nothing can be done about an error: at the end.
  void synchronize_if_there() const noexcept { driver_.stream_synchronize(stream_); }

  /// Memory that begins with `bytes`, and has more of them `pitch` bytes after one another.
  struct Rows {
    CudaDriver::Pointer begin;
    std::size_t pitch;
  };

  /// Copies `count` rows of `bytes`, with one call of the driver if it can. The host's memory must be pinned.
  void copy(const Rows& to, const Rows& from, std::size_t bytes, std::int64_t count) const;

 private:
  const CudaDriver& driver_;
  CudaDriver::Handle stream_ = nullptr;
};

/// Memory of a GPU, from a pool of the driver or where it has none allocated by itself.
///
/// The pool keeps what is freed: so later allocations take no time of the system.
class CudaPool {
 public:
  /// Allocations are made on the stream, for which others must wait.
  CudaPool(const CudaDriver& driver, CudaDriver::Device device, const CudaStream& stream);
  ~CudaPool();
  CudaPool(const CudaPool&) = delete;
  CudaPool& operator=(const CudaPool&) = delete;

  CudaDriver::Result allocate(CudaDriver::Pointer* address, std::size_t bytes) const;
  void free(CudaDriver::Pointer address) const noexcept;

  std::size_t spare_bytes() const;  ///< bytes that the pool keeps and nobody has

 private:
  const CudaDriver& driver_;
  const CudaStream& stream_;
  CudaDriver::Handle pool_ = nullptr;  ///< nullptr: there is none
};

/// Memory of a GPU, and memory of the host that it accesses at the same addresses.
///
/// What kernels work on is the GPU's, and the host never accesses it: the driver copies and clears it. What the host
/// writes or reads in each step is pinned memory of its own, which kernels access over the bus.
class CudaMemory {
 public:
  /// `stream`: on which kernels run.
  CudaMemory(const CudaDriver& driver, CudaDriver::Device device, const CudaContext& context, const CudaStream& stream);
  ~CudaMemory();
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;

  /// Returns zeroed memory, until the end. Throws OutOfMemory. Any thread, also while another one captures a graph.
  std::byte* allocate(std::size_t bytes);
  std::byte* allocate_exchanged(std::size_t bytes);

  /// Frees what `allocate_exchanged` has returned, before the end.
  void free_exchanged(std::byte* memory) noexcept;

  bool holds(const void* address, std::size_t bytes) const;

  std::size_t free_bytes() const { return info().free + pool_.spare_bytes(); }  ///< bytes of the GPU that nobody has
  std::size_t total_bytes() const { return info().total; }                      ///< bytes of the GPU

  /// Copies and waits: within the GPU after the kernels that were launched before, while no other thread captures the
  /// stream; from and to exchanged memory beside kernels, by any thread.
  void copy(std::byte* to, const std::byte* from, const Pieces& pieces) const;

  /// Copies from the host, and clears, before the next kernels.
  void write(std::byte* to, const void* from, std::size_t bytes) const;
  void clear(std::byte* memory, const Pieces& pieces) const;

 private:
  struct Part {
    std::size_t bytes;
    bool is_exchanged;
  };

  struct Info {
    std::size_t free = 0, total = 0;
  };

  Info info() const;
  void check_allocation(CudaDriver::Result result, std::size_t bytes) const;
  bool is_on_gpu(const void* address) const;
  const std::pair<std::byte* const, Part>* find(const void* address) const;

  const CudaDriver& driver_;
  const CudaContext& context_;
  const CudaStream& stream_;
  CudaStream copies_;
  CudaPool pool_;
  mutable std::mutex mutex_;  ///< guards `parts_`
  std::map<std::byte*, Part> parts_;
};

}  // namespace quire
