#pragma once

#include <cstddef>
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

 private:
  const CudaDriver& driver_;
  CudaDriver::Handle stream_ = nullptr;
};

/// Memory that a GPU and the host have at the same addresses.
///
/// What kernels work on is managed memory that prefers the GPU: there it stays, if the host has copies and fills made
/// by the driver. What the host writes or reads in each step is memory of the host that the GPU accesses over the bus.
/// So no step moves pages of memory to and fro.
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

  /// Moves all memory that prefers the GPU there, or a part of it.
  void settle();
  void settle(const std::byte* memory, std::size_t bytes);

  bool holds(const void* address, std::size_t bytes) const;

  std::size_t free_bytes() const { return info().free; }    ///< bytes of the GPU that nobody has
  std::size_t total_bytes() const { return info().total; }  ///< bytes of the GPU

  /// Copies and waits. Copies from and to the host are made beside kernels, by any thread; those within the GPU after
  /// the kernels that were launched before, by the thread that launches them.
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
  void prepare(std::byte* memory, std::size_t bytes);
  bool is_on_gpu(const void* address) const;
  const std::pair<std::byte* const, Part>* find(const void* address) const;

  const CudaDriver& driver_;
  CudaDriver::Device device_;
  const CudaContext& context_;
  const CudaStream& stream_;
  CudaStream copies_;
  mutable std::mutex mutex_;  ///< guards `parts_`
  std::map<std::byte*, Part> parts_;
};

}  // namespace quire
