#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "compute/cuda_driver.h"
#include "compute/device.h"

namespace quire {

/// One of NVIDIA's GPUs. Each thread of it computes one work item.
///
/// All memory is managed: it moves to where it is accessed, so that weights and KV pages stay on the GPU, and what the
/// host writes for a step and reads after it goes back and forth. No memory of files can be had.
class CudaDevice final : public Device {
 public:
  /// Returns the names of the GPUs here, in the order of their numbers. Throws std::runtime_error, with the reason, if
  /// they have no driver.
  static std::vector<std::string> names();

  /// Opens GPU number `ordinal`. Throws std::runtime_error, with the reason, if it can't be used.
  CudaDevice(int ordinal, ThreadPool& threads);
  ~CudaDevice() override;

  const std::string& name() const { return name_; }
  const std::string& architecture() const { return architecture_; }  ///< "sm_90" and the like
  std::size_t free_memory() const;                                   ///< bytes

  /// Returns the number by which launches name the function `entry` of PTX. Throws std::runtime_error. Any thread.
  std::uintptr_t load(const std::string& ptx, const std::string& entry);

  std::byte* allocate(std::size_t bytes) override;
  std::byte* allocate_matrix(std::size_t bytes) override { return allocate(bytes); }
  void place_matrix(std::byte*, std::size_t) const override {}
  bool maps_files() const override { return false; }
  std::byte* map_file(int fd, std::size_t bytes, bool writable) override;
  void make_read_only(std::byte* memory) override;
  void check(const void* address, std::size_t bytes) const override;

  std::span<const std::byte> read(std::span<const std::byte> memory, std::vector<std::byte>& buffer) const override;

  /// Does nothing: memory is there once it is allocated.
  void touch(std::byte*, std::byte*, std::int64_t) const override {}
  void copy(std::byte* to, const std::byte* from, const Pieces& pieces) const override;
  void clear(std::byte* memory, const Pieces& pieces) const override;

  void begin_step() override;

  /// Returns the address of a copy of the numbers.
  PageList page_list(std::span<const std::int32_t> pages) override;
  std::int64_t busy_items() const override;
  void run(const Plan& plan, const Dims& dims) override;
  std::vector<double> profile(const Plan& plan, const Dims& dims) override;

 private:
  /// Memory of a step: given out from the beginning again once the step has ended.
  class StepMemory;

  /// Runs the launches of a plan, and calls on_launched() after each has begun.
  template <class OnLaunched>
  void run_launches(const Plan& plan, const Dims& dims, OnLaunched on_launched);
  void launch(const Launch& launch, CudaDriver::Pointer buffers, CudaDriver::Pointer dims, std::int64_t items) const;

  const CudaDriver& driver_;
  CudaDriver::Device device_ = 0;
  CudaDriver::Handle context_ = nullptr;
  std::string name_, architecture_;
  std::int64_t multiprocessors_ = 0;
  mutable std::mutex mutex_;  ///< guards `memory_` and `modules_`
  std::vector<std::span<std::byte>> memory_;
  std::vector<CudaDriver::Handle> modules_;
  std::unique_ptr<StepMemory> page_lists_, operands_;
};

}  // namespace quire
