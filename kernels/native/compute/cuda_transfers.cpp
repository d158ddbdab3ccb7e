#include "compute/cuda_transfers.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <utility>

namespace quire {
namespace {

constexpr std::size_t kStagingBytes = std::size_t{4} << 20;
constexpr std::size_t kCleared = std::size_t{1} << 20;  // bytes of a matrix that a thread clears at once

CudaDriver::Pointer pointer(const std::byte* memory) { return reinterpret_cast<CudaDriver::Pointer>(memory); }

/// Returns the number of first runs that are copied at once: those that fit in a buffer, but one at least.
std::size_t num_at_once(Runs runs) {
  std::size_t count = 0;
  for (std::size_t bytes = 0; count < runs.size(); count++)
    if ((bytes += runs[count].size()) > kStagingBytes && count > 0) break;
  return count;
}

std::vector<Runs> batches_of(Runs runs) {
  std::vector<Runs> batches;
  for (; !runs.empty(); runs = runs.subspan(batches.back().size())) batches.push_back(runs.first(num_at_once(runs)));
  return batches;
}

/// Returns the number of first runs that are rows: as long as each other, at equal distances.
std::size_t num_rows(Runs runs) {
  std::size_t count = 1;
  if (runs.size() == 1) return count;
  const std::ptrdiff_t pitch = runs[1].data() - runs[0].data();
  if (std::cmp_less(pitch, runs[0].size())) return count;
  const auto is_next = [&](std::size_t i) {
    return runs[i].size() == runs[0].size() && runs[i].data() - runs[i - 1].data() == pitch;
  };
  while (count < runs.size() && is_next(count)) count++;
  return count;
}

}  // namespace

/// Pinned memory with one batch of runs, and a stream. The memory grows for a run that it can't hold.
class CudaTransfers::StagingBuffer {
 public:
  StagingBuffer(const CudaDriver& driver, const CudaContext& context, CudaMemory& memory)
      : stream_(driver, context), memory_(memory) {
    reserve(kStagingBytes);
  }
  ~StagingBuffer() { free(); }
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;

  bool is_large() const { return size_ > kStagingBytes; }
  Runs host() const { return host_; }
  void wait() const { stream_.synchronize("copy memory"); }
  void wait_if_there() const noexcept { stream_.synchronize_if_there(); }

  /// Lets its memory stand for runs. Nothing may be copied meanwhile.
  void set(Runs runs) {
    std::size_t bytes = 0;
    for (const auto run : runs) bytes += run.size();
    reserve(bytes);
    device_ = runs;
    host_.clear();
    std::byte* at = begin_;
    for (const auto run : runs) at = host_.emplace_back(at, run.size()).data() + run.size();
  }

  /// Begin to copy the runs.
  void read() const {
    for_each_rows([&](const Rows& host, const Rows& device, std::size_t bytes, std::int64_t count) {
      stream_.copy(host, device, bytes, count);
    });
  }
  void write() const {
    for_each_rows([&](const Rows& host, const Rows& device, std::size_t bytes, std::int64_t count) {
      stream_.copy(device, host, bytes, count);
    });
  }

 private:
  using Rows = CudaStream::Rows;

  template <class Copy>
  void for_each_rows(Copy copy) const {
    for (std::size_t i = 0; i < device_.size();) {
      const std::size_t rows = num_rows(device_.subspan(i)), size = device_[i].size();
      const std::size_t pitch = rows == 1 ? size : static_cast<std::size_t>(device_[i + 1].data() - device_[i].data());
      if (size > 0)
        copy({pointer(host_[i].data()), size}, {pointer(device_[i].data()), pitch}, size,
             static_cast<std::int64_t>(rows));
      i += rows;
    }
  }

  void reserve(std::size_t bytes) {
    if (bytes <= size_) return;
    free();
    begin_ = memory_.allocate_exchanged(bytes);
    size_ = bytes;
  }

  void free() noexcept {
    if (size_ > 0) memory_.free_exchanged(begin_);
    size_ = 0;
  }

  CudaStream stream_;
  CudaMemory& memory_;
  std::byte* begin_ = nullptr;
  std::size_t size_ = 0;
  Runs device_;
  std::vector<std::span<std::byte>> host_;
};

/// The buffers of a thread while it copies batches, which take turns.
class CudaTransfers::StagingBuffers {
 public:
  explicit StagingBuffers(CudaTransfers& transfers) : transfers_(transfers) { transfers_.context_.use(); }
  ~StagingBuffers() {
    for (auto& buffer : buffers_)
      if (buffer) transfers_.give_back(std::move(buffer));
  }
  StagingBuffers(const StagingBuffers&) = delete;
  StagingBuffers& operator=(const StagingBuffers&) = delete;

  StagingBuffer& operator[](std::size_t batch) {
    auto& buffer = buffers_[batch % buffers_.size()];
    if (!buffer) buffer = transfers_.take();
    return *buffer;
  }

  void wait() const {
    for (const auto& buffer : buffers_)
      if (buffer) buffer->wait();
  }

 private:
  CudaTransfers& transfers_;
  std::array<std::unique_ptr<StagingBuffer>, 2> buffers_;
};

/// Packing threads write at random places, so its memory is pinned as a whole. It is cleared by all threads.
class CudaTransfers::PinnedMatrix final : public MatrixBuffer {
 public:
  PinnedMatrix(const Device& device, CudaMemory& memory) : MatrixBuffer(device), memory_(memory) {}
  ~PinnedMatrix() override { free(); }

  void end() override {
    if (!matrix_.empty()) memory_.copy(matrix_.data(), buffer_.data(), {matrix_.size()});
    matrix_ = {};
  }

 private:
  std::byte* memory_for(std::span<std::byte> matrix) override {
    matrix_ = matrix;
    if (matrix.size() > buffer_.size()) {
      free();
      buffer_ = {memory_.allocate_exchanged(matrix.size()), matrix.size()};
    } else {
      clear(buffer_.first(matrix.size()));
    }
    return buffer_.data();
  }

  void clear(std::span<std::byte> memory) {
    const std::vector<std::span<std::byte>> parts = split(memory, kCleared);
    std::atomic<std::size_t> next{0};
    device().threads().run([&](int) {
      for (std::size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < parts.size();)
        std::memset(parts[i].data(), 0, parts[i].size());
    });
  }

  void free() noexcept {
    if (!buffer_.empty()) memory_.free_exchanged(buffer_.data());
    buffer_ = {};
  }

  CudaMemory& memory_;
  std::span<std::byte> matrix_, buffer_;
};

CudaTransfers::CudaTransfers(const CudaDriver& driver, const CudaContext& context, CudaMemory& memory)
    : driver_(driver), context_(context), memory_(memory) {}

CudaTransfers::~CudaTransfers() = default;

std::unique_ptr<CudaTransfers::StagingBuffer> CudaTransfers::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto buffer = std::move(idle_.back());
      idle_.pop_back();
      return buffer;
    }
  }
  return std::make_unique<StagingBuffer>(driver_, context_, memory_);
}

/// Takes a buffer back, unless its memory has grown. What is still copied after an error is waited for.
void CudaTransfers::give_back(std::unique_ptr<StagingBuffer> buffer) noexcept {
  buffer->wait_if_there();
  if (buffer->is_large()) return;
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(buffer));
}

void CudaTransfers::read(Runs runs, const UseRuns& use) {
  const std::vector<Runs> batches = batches_of(runs);
  StagingBuffers buffers(*this);
  std::size_t first = 0;
  for (std::size_t i = 0; i <= batches.size(); i++) {
    if (i < batches.size()) {
      buffers[i].set(batches[i]);
      buffers[i].read();
    }
    if (i == 0) continue;
    buffers[i - 1].wait();
    use(first, buffers[i - 1].host());
    first += batches[i - 1].size();
  }
}

void CudaTransfers::write(Runs runs, const UseRuns& fill) {
  const std::vector<Runs> batches = batches_of(runs);
  StagingBuffers buffers(*this);
  std::size_t first = 0;
  for (std::size_t i = 0; i < batches.size(); i++) {
    buffers[i].wait();
    buffers[i].set(batches[i]);
    fill(first, buffers[i].host());
    buffers[i].write();
    first += batches[i].size();
  }
  buffers.wait();
}

std::unique_ptr<MatrixBuffer> CudaTransfers::matrix_buffer(const Device& device) {
  return std::make_unique<PinnedMatrix>(device, memory_);
}

}  // namespace quire
