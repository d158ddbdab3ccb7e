#include "compute/cuda_transfers.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

namespace quire {
namespace {

constexpr std::size_t kLaneBytes = std::size_t{16} << 20;
constexpr std::size_t kCleared = std::size_t{1} << 20;  // bytes of a matrix that a thread clears at once

CudaDriver::Pointer pointer(const std::byte* memory) { return reinterpret_cast<CudaDriver::Pointer>(memory); }

/// Returns the number of first runs that are copied at once: those that fit in a lane, but one at least.
std::size_t num_at_once(Runs runs) {
  std::size_t count = 0;
  for (std::size_t bytes = 0; count < runs.size(); count++)
    if ((bytes += runs[count].size()) > kLaneBytes && count > 0) break;
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
class CudaTransfers::Lane {
 public:
  Lane(const CudaDriver& driver, const CudaContext& context, CudaMemory& memory)
      : stream_(driver, context), memory_(memory) {
    reserve(kLaneBytes);
  }
  ~Lane() { free(); }
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  bool is_large() const { return size_ > kLaneBytes; }
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

/// The lanes of a thread while it copies batches, which take turns.
class CudaTransfers::LanePair {
 public:
  explicit LanePair(CudaTransfers& transfers) : transfers_(transfers) { transfers_.context_.use(); }
  ~LanePair() {
    for (auto& lane : lanes_)
      if (lane) transfers_.give_back(std::move(lane));
  }
  LanePair(const LanePair&) = delete;
  LanePair& operator=(const LanePair&) = delete;

  Lane& operator[](std::size_t batch) {
    auto& lane = lanes_[batch % lanes_.size()];
    if (!lane) lane = transfers_.take();
    return *lane;
  }

  void wait() const {
    for (const auto& lane : lanes_)
      if (lane) lane->wait();
  }

 private:
  CudaTransfers& transfers_;
  std::array<std::unique_ptr<Lane>, 2> lanes_;
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
    ThreadPool& threads = device().threads();
    threads.run([&](int thread) {
      for (auto i = static_cast<std::size_t>(thread); i < parts.size(); i += static_cast<std::size_t>(threads.size()))
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

std::unique_ptr<CudaTransfers::Lane> CudaTransfers::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      auto lane = std::move(idle_.back());
      idle_.pop_back();
      return lane;
    }
  }
  return std::make_unique<Lane>(driver_, context_, memory_);
}

/// Takes a lane back, unless its memory has grown. What is still copied after an error is waited for.
void CudaTransfers::give_back(std::unique_ptr<Lane> lane) noexcept {
  lane->wait_if_there();
  if (lane->is_large()) return;
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(lane));
}

void CudaTransfers::read(Runs runs, const UseRuns& use) {
  const std::vector<Runs> batches = batches_of(runs);
  LanePair lanes(*this);
  std::size_t first = 0;
  for (std::size_t i = 0; i <= batches.size(); i++) {
    if (i < batches.size()) {
      lanes[i].set(batches[i]);
      lanes[i].read();
    }
    if (i == 0) continue;
    lanes[i - 1].wait();
    use(first, lanes[i - 1].host());
    first += batches[i - 1].size();
  }
}

void CudaTransfers::write(Runs runs, const UseRuns& fill) {
  const std::vector<Runs> batches = batches_of(runs);
  LanePair lanes(*this);
  std::size_t first = 0;
  for (std::size_t i = 0; i < batches.size(); i++) {
    lanes[i].wait();
    lanes[i].set(batches[i]);
    fill(first, lanes[i].host());
    lanes[i].write();
    first += batches[i].size();
  }
  lanes.wait();
}

std::unique_ptr<MatrixBuffer> CudaTransfers::matrix_buffer(const Device& device) {
  return std::make_unique<PinnedMatrix>(device, memory_);
}

}  // namespace quire
