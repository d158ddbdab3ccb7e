#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "compute/cuda_driver.h"
#include "compute/cuda_memory.h"
#include "compute/device.h"

namespace quire {

/// Copies between memory of a GPU and of the host, beside kernels. Any thread.
///
/// They go through staging buffers of pinned memory, each with a stream of its own: so no thread waits for what others
/// copy. While the host uses what is in one buffer, what comes next is copied in another.
class CudaTransfers {
 public:
  CudaTransfers(const CudaDriver& driver, const CudaContext& context, CudaMemory& memory);
  ~CudaTransfers();
  CudaTransfers(const CudaTransfers&) = delete;
  CudaTransfers& operator=(const CudaTransfers&) = delete;

  /// See Device.
  void read(Runs runs, const UseRuns& use);
  void write(Runs runs, const UseRuns& fill);

  /// Returns one with pinned memory, as much as the largest matrix takes.
  std::unique_ptr<MatrixBuffer> matrix_buffer(const Device& device);

 private:
  class StagingBuffer;
  class StagingBuffers;
  class PinnedMatrix;

  std::unique_ptr<StagingBuffer> take();
  void give_back(std::unique_ptr<StagingBuffer> buffer) noexcept;

  const CudaDriver& driver_;
  const CudaContext& context_;
  CudaMemory& memory_;
  std::mutex mutex_;                                  ///< guards `idle_`
  std::vector<std::unique_ptr<StagingBuffer>> idle_;  ///< those that no thread has
};

}  // namespace quire
