#include "compute/cuda_memory.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "compute/arena.h"

namespace quire {
namespace {

constexpr unsigned kPortableAndMapped = 3;      // CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
constexpr unsigned kNonBlocking = 1;            // CU_STREAM_NON_BLOCKING
constexpr std::size_t kMostPitch = 0x7FFFFFFF;  // of a driver's GPUs, by CU_DEVICE_ATTRIBUTE_MAX_PITCH

CudaDriver::Pointer pointer(const std::byte* memory) { return reinterpret_cast<CudaDriver::Pointer>(memory); }

}  // namespace

CudaContext::CudaContext(const CudaDriver& driver, CudaDriver::Device device) : driver_(driver), device_(device) {
  driver_.check(driver_.context_retain(&context_, device_), "open the GPU");
}

CudaContext::~CudaContext() { driver_.context_release(device_); }

CudaStream::CudaStream(const CudaDriver& driver, const CudaContext& context) : driver_(driver) {
  context.use();
  driver_.check(driver_.stream_create(&stream_, kNonBlocking), "create a stream");
}

CudaStream::~CudaStream() { driver_.stream_destroy(stream_); }

void CudaStream::copy(const Rows& to, const Rows& from, std::size_t bytes, std::int64_t count) const {
  const auto rows = static_cast<std::size_t>(count);
  if (rows > 1 && std::max(to.pitch, from.pitch) <= kMostPitch) {
    const CudaDriver::Copy2d copy{.from = {.address = from.begin, .pitch = from.pitch},
                                  .to = {.address = to.begin, .pitch = to.pitch},
                                  .width = bytes,
                                  .height = rows};
    const CudaDriver::Result result = driver_.copy_2d(&copy, stream_);
    if (result != CudaDriver::kInvalidValue) {  // within a GPU it need not take pitches that are not its own
      driver_.check(result, "copy memory");
      return;
    }
  }
  for (std::size_t i = 0; i < rows; i++)
    driver_.check(driver_.copy(to.begin + i * to.pitch, from.begin + i * from.pitch, bytes, stream_), "copy memory");
}

CudaPool::CudaPool(const CudaDriver& driver, CudaDriver::Device device, const CudaStream& stream)
    : driver_(driver), stream_(stream) {
  int is_there = 0;  // and so it stays with drivers that do not know of pools
  if (!driver_.has_pools() || driver_.device_attribute(&is_there, CudaDriver::kMemoryPools, device) != 0) return;
  if (is_there == 0) return;
  driver_.check(driver_.default_pool(&pool_, device), "find its memory");
  std::uint64_t all = std::numeric_limits<std::uint64_t>::max();
  driver_.check(driver_.pool_set(pool_, CudaDriver::kReleaseThreshold, &all), "keep memory");
}

CudaPool::~CudaPool() {
  if (pool_ == nullptr) return;
  stream_.synchronize_if_there();
  driver_.pool_trim(pool_, 0);
}

CudaDriver::Result CudaPool::allocate(CudaDriver::Pointer* address, std::size_t bytes) const {
  return pool_ == nullptr ? driver_.allocate(address, bytes) : driver_.allocate_async(address, bytes, stream_.handle());
}

void CudaPool::free(CudaDriver::Pointer address) const noexcept {
  pool_ == nullptr ? driver_.free(address) : driver_.free_async(address, stream_.handle());
}

std::size_t CudaPool::spare_bytes() const {
  if (pool_ == nullptr) return 0;
  std::uint64_t reserved = 0, used = 0;
  driver_.check(driver_.pool_get(pool_, CudaDriver::kReservedBytes, &reserved), "tell its memory");
  driver_.check(driver_.pool_get(pool_, CudaDriver::kUsedBytes, &used), "tell its memory");
  return reserved - std::min(reserved, used);
}

CudaMemory::CudaMemory(const CudaDriver& driver, CudaDriver::Device device, const CudaContext& context,
                       const CudaStream& stream)
    : driver_(driver), context_(context), stream_(stream), copies_(driver, context), pool_(driver, device, copies_) {}

CudaMemory::~CudaMemory() {
  for (const auto& [memory, part] : parts_)
    part.is_exchanged ? static_cast<void>(driver_.free_host(memory)) : pool_.free(pointer(memory));
}

CudaMemory::Info CudaMemory::info() const {
  Info info;
  context_.use();
  driver_.check(driver_.memory_info(&info.free, &info.total), "tell its memory");
  return info;
}

/// Throws OutOfMemory if that is why an allocation has failed, or the driver's error if it is another.
void CudaMemory::check_allocation(CudaDriver::Result result, std::size_t bytes) const {
  if (result == CudaDriver::kOutOfMemory) throw OutOfMemory(bytes);
  driver_.check(result, "allocate memory");
}

std::byte* CudaMemory::allocate(std::size_t bytes) {
  context_.use();
  const std::size_t size = std::max(bytes, std::size_t{1});
  CudaDriver::Pointer address = 0;
  check_allocation(pool_.allocate(&address, size), bytes);
  auto* memory = reinterpret_cast<std::byte*>(address);
  try {
    driver_.check(driver_.clear(address, 0, size, copies_.handle()), "clear memory");
    copies_.synchronize("clear memory");  // not the stream on which kernels run: another thread may capture that
    const std::lock_guard lock(mutex_);
    parts_.emplace(memory, Part{size, false});
  } catch (...) {
    pool_.free(address);
    throw;
  }
  return memory;
}

std::byte* CudaMemory::allocate_exchanged(std::size_t bytes) {
  context_.use();
  const std::size_t size = std::max(bytes, std::size_t{1});
  void* address = nullptr;
  check_allocation(driver_.allocate_host(&address, size, kPortableAndMapped), bytes);
  std::memset(address, 0, size);
  const std::lock_guard lock(mutex_);
  parts_.emplace(static_cast<std::byte*>(address), Part{size, true});
  return static_cast<std::byte*>(address);
}

void CudaMemory::free_exchanged(std::byte* memory) noexcept {
  {
    const std::lock_guard lock(mutex_);
    parts_.erase(memory);
  }
  driver_.free_host(memory);
}

/// Returns the part that an address lies in, or nullptr.
const std::pair<std::byte* const, CudaMemory::Part>* CudaMemory::find(const void* address) const {
  const auto next = parts_.upper_bound(const_cast<std::byte*>(static_cast<const std::byte*>(address)));
  if (next == parts_.begin()) return nullptr;
  const auto& part = *std::prev(next);
  return lies_within(address, 1, {part.first, part.second.bytes}) ? &part : nullptr;
}

bool CudaMemory::holds(const void* address, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto* part = find(address);
  return part != nullptr && lies_within(address, bytes, {part->first, part->second.bytes});
}

bool CudaMemory::is_on_gpu(const void* address) const {
  const std::lock_guard lock(mutex_);
  const auto* part = find(address);
  return part != nullptr && !part->second.is_exchanged;
}

void CudaMemory::copy(std::byte* to, const std::byte* from, const Pieces& pieces) const {
  const bool is_within = is_on_gpu(to) && is_on_gpu(from);
  context_.use();
  const CudaStream& stream = is_within ? stream_ : copies_;
  stream.copy({pointer(to), pieces.stride}, {pointer(from), pieces.stride}, pieces.bytes, pieces.count);
  stream.synchronize("copy memory");
}

void CudaMemory::write(std::byte* to, const void* from, std::size_t bytes) const {
  driver_.check(driver_.copy_to(pointer(to), from, bytes, stream_.handle()), "write memory");
}

void CudaMemory::clear(std::byte* memory, const Pieces& pieces) const {
  context_.use();
  const std::size_t pitch = std::max(pieces.stride, pieces.bytes);
  if (pitch <= kMostPitch) {
    driver_.check(driver_.clear_2d(pointer(memory), pitch, 0, pieces.bytes, static_cast<std::size_t>(pieces.count),
                                   stream_.handle()),
                  "clear memory");
    return;
  }
  for (std::int64_t i = 0; i < pieces.count; i++, memory += pieces.stride)
    driver_.check(driver_.clear(pointer(memory), 0, pieces.bytes, stream_.handle()), "clear memory");
}

}  // namespace quire
