#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "compute/cuda_driver.h"
#include "compute/cuda_kernel.h"
#include "compute/cuda_memory.h"
#include "compute/cuda_steps.h"
#include "compute/cuda_transfers.h"
#include "compute/device.h"
#include "jit/object_cache.h"

namespace quire {

/// One of NVIDIA's GPUs. Its threads compute work items in the shape that a kernel was loaded with. No memory of files
/// can be had.
class CudaDevice final : public Device {
 public:
  /// Returns the names of the GPUs here, in the order of their numbers. Throws std::runtime_error, with the reason, if
  /// they have no driver.
  static std::vector<std::string> names();

  /// Returns what kernels of GPU number `ordinal` are compiled for, "sm_90" and the like, without opening it. Throws
  /// std::runtime_error, with the reason, if it can't be used.
  static std::string architecture_of(int ordinal);

  /// Opens GPU number `ordinal`. Code of kernels is kept in `cache_dir`, if that is not empty. `warn` may be empty.
  /// Throws std::runtime_error, with the reason, if the GPU can't be used.
  CudaDevice(int ordinal, ThreadPool& threads, std::filesystem::path cache_dir, Warn warn);
  ~CudaDevice() override;

  const std::string& name() const { return name_; }
  const std::string& architecture() const { return architecture_; }
  std::size_t free_memory() const { return memory_.free_bytes(); }
  std::size_t total_memory() const { return memory_.total_bytes(); }
  const ObjectCache& cache() const { return cache_; }  ///< the code of kernels
  std::int64_t num_graph_launches() const { return steps_.num_graph_launches(); }

  /// Returns the bytes of its memory that the driver takes for threads of the loaded kernels, beside registers: as many
  /// as it can run at a time, each with as much as the one that needs most. Any thread.
  std::size_t thread_memory() const;

  /// Returns the number by which launches name the function `entry` of PTX, in the shape of a CudaKernel. Throws
  /// std::runtime_error, or std::invalid_argument for a shape. Any thread.
  std::uintptr_t load(const std::string& ptx, const std::string& entry, std::int64_t threads_per_item,
                      std::int64_t threads_per_block, std::int64_t shared_bytes);

  std::byte* allocate(std::size_t bytes) override { return memory_.allocate(bytes); }
  std::byte* allocate_exchanged(std::size_t bytes) override { return memory_.allocate_exchanged(bytes); }
  std::byte* allocate_matrix(std::size_t bytes) override { return allocate(bytes); }
  std::unique_ptr<MatrixBuffer> matrix_buffer() override { return transfers_.matrix_buffer(*this); }
  void place_matrix(std::byte*, std::size_t) const override {}
  bool in_host_memory() const override { return false; }
  std::byte* map_file(int fd, std::size_t bytes, bool writable) override;
  void make_read_only(std::byte* memory) override;
  void check(const void* address, std::size_t bytes) const override;
  void read(Runs runs, const UseRuns& use) const override { transfers_.read(runs, use); }
  void write(Runs runs, const UseRuns& fill) const override { transfers_.write(runs, fill); }

  /// Does nothing: memory is there once it is allocated.
  void touch(std::byte*, std::byte*, std::int64_t) const override {}
  void copy(std::byte* to, const std::byte* from, const Pieces& pieces) const override {
    memory_.copy(to, from, pieces);
  }
  void clear(std::byte* memory, const Pieces& pieces) const override { memory_.clear(memory, pieces); }

  void begin_step() override;

  /// Returns the address of a copy of the numbers, which is written when the step runs.
  PageList page_list(std::span<const std::int32_t> pages) override;
  std::int64_t busy_items() const override;
  void run(const Plan& plan, const Dims& dims) override;
  std::vector<double> profile(const Plan& plan, const Dims& dims) override;

 private:
  /// Page lists of a step.
  class PageLists;

  std::string link(const std::string& ptx) const;
  void launch(const Launch& launch, const CudaStep& step, const CudaStep::Part& part) const;

  const CudaDriver& driver_;
  CudaDriver::Device device_;
  std::string name_, architecture_;
  std::int64_t multiprocessors_ = 0, threads_at_once_ = 0;
  CudaContext context_;
  CudaStream stream_;
  CudaMemory memory_;
  mutable CudaTransfers transfers_;
  CudaSteps steps_;
  ObjectCache cache_;
  mutable std::mutex mutex_;      ///< guards what follows, up to `kernels_`
  std::int64_t local_bytes_ = 0;  ///< the most of a thread
  std::vector<CudaDriver::Handle> modules_;
  std::deque<CudaKernel> kernels_;  ///< whose addresses are their numbers
  std::unique_ptr<PageLists> page_lists_;
};

}  // namespace quire
