#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "compute/abi.h"
#include "compute/plan.h"
#include "compute/thread_pool.h"

namespace quire {

/// Pieces of memory at equal distances: of a KV page in one layer, one for each head.
struct Pieces {
  std::size_t bytes;  ///< size of a piece
  std::int64_t count = 1;
  std::size_t stride = 0;  ///< bytes from the start of one piece to that of the next
};

/// Runs of memory, one after the other.
using Runs = std::span<const std::span<std::byte>>;

/// What the host does with runs of memory: `host` are those from number `first` on, where it may access them.
using UseRuns = std::function<void(std::size_t first, Runs host)>;

class Device;

/// Where the host writes the matrices of a device, one after the other: their own memory, if it may access that.
class MatrixBuffer {
 public:
  explicit MatrixBuffer(const Device& device) : device_(device) {}  ///< `device` must outlive the buffer
  virtual ~MatrixBuffer() = default;
  MatrixBuffer(const MatrixBuffer&) = delete;
  MatrixBuffer& operator=(const MatrixBuffer&) = delete;

  /// Returns the memory of a matrix, which must be zero, or other zeroed memory, which `end` copies there. Throws
  /// std::invalid_argument unless the matrix is memory of the device.
  std::byte* begin(std::span<std::byte> matrix);
  virtual void end() {}

 protected:
  const Device& device() const { return device_; }

 private:
  virtual std::byte* memory_for(std::span<std::byte> matrix) { return matrix.data(); }

  const Device& device_;
};

/// What computes a model: memory, copies within it, and launches over it. See cpu_device.h and cuda_device.h.
///
/// The host accesses its memory through `read` and `write`, but for exchanged memory, which it may access as its own.
/// It comes with threads of the host, which pack weights and sample, and may also be those that run its kernels.
class Device {
 public:
  explicit Device(ThreadPool& threads) : threads_(threads) {}  ///< `threads` must outlive the device
  virtual ~Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  ThreadPool& threads() const { return threads_; }

  /// Returns zeroed memory, aligned to cache lines, that lives as long as the device. Throws OutOfMemory.
  virtual std::byte* allocate(std::size_t bytes) = 0;

  /// Returns such memory for what the host writes or reads in each step.
  virtual std::byte* allocate_exchanged(std::size_t bytes) { return allocate(bytes); }

  /// Allocates memory for a matrix whose columns lie one after the other, each part near the units that `run` prefers
  /// to give it to.
  virtual std::byte* allocate_matrix(std::size_t bytes) = 0;

  virtual std::unique_ptr<MatrixBuffer> matrix_buffer() { return std::make_unique<MatrixBuffer>(*this); }

  /// Prepares memory of a file for a matrix, each part of its columns near the units that `run` prefers to give it to.
  virtual void place_matrix(std::byte* memory, std::size_t bytes) const = 0;

  /// Returns true if all of its memory is the host's. Then files can be mapped into it too, which other processes share
  /// or find later.
  virtual bool in_host_memory() const = 0;

  /// Maps the first bytes of a file, which must have as many, into memory that lives as long as the device. Throws
  /// OutOfMemory or std::system_error.
  virtual std::byte* map_file(int fd, std::size_t bytes, bool writable) = 0;

  /// Ends the writing to a file that was mapped here, from its first byte on. Throws std::system_error, or
  /// std::invalid_argument for an address that is none of a file.
  virtual void make_read_only(std::byte* memory) = 0;

  /// Throws std::invalid_argument unless all of the memory was allocated or mapped here.
  virtual void check(const void* address, std::size_t bytes) const = 0;

  /// Calls `use` with runs of its memory, in order and a number at a time: with the memory itself, or copies of it,
  /// which are good during the call. Others are copied meanwhile. Any thread.
  virtual void read(Runs runs, const UseRuns& use) const = 0;

  /// Writes runs of its memory in the same way: `fill` writes all of what it is called with. Any thread.
  virtual void write(Runs runs, const UseRuns& fill) const = 0;

  /// Copies memory of the host to its own, or the reverse. Any thread.
  void write(std::byte* to, std::span<const std::byte> from) const;
  void read(std::span<std::byte> to, std::byte* from) const;

  /// Makes a part of a head's KV memory resident, so that no step waits for it. Any thread.
  virtual void touch(std::byte* begin, std::byte* end, std::int64_t head) const = 0;

  /// Copies pieces, which lie equally far apart in both places, within its memory.
  virtual void copy(std::byte* to, const std::byte* from, const Pieces& pieces) const = 0;
  virtual void clear(std::byte* memory, const Pieces& pieces) const = 0;

  /// Begins a step: the page lists of the one before are no longer used.
  virtual void begin_step() = 0;

  /// Returns the value by which kernels of this step find the pages of a sequence. The numbers that are given must stay
  /// where they are.
  virtual PageList page_list(std::span<const std::int32_t> pages) = 0;

  /// Number of work items of attention below which a launch leaves a part of the device idle; 0 if none does.
  virtual std::int64_t busy_items() const = 0;

  /// Runs the launches of a plan one after the other.
  virtual void run(const Plan& plan, const Dims& dims) = 0;

  /// Runs them likewise. Returns the seconds of each, from the end of the one before.
  virtual std::vector<double> profile(const Plan& plan, const Dims& dims) = 0;

 private:
  ThreadPool& threads_;
};

/// Returns the runs of memory of `most` bytes, but for the last one.
std::vector<std::span<std::byte>> split(std::span<std::byte> memory, std::size_t most);

}  // namespace quire
