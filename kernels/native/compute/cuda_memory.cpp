#include "compute/cuda_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "compute/arena.h"

namespace quire {
namespace {

constexpr unsigned kAttachGlobal = 1;           // CU_MEM_ATTACH_GLOBAL
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

CudaMemory::CudaMemory(const CudaDriver& driver, CudaDriver::Device device, const CudaContext& context,
                       const CudaStream& stream)
    : driver_(driver), device_(device), context_(context), stream_(stream), copies_(driver, context) {}

CudaMemory::~CudaMemory() {
  for (const auto& [memory, part] : parts_)
    part.is_exchanged ? driver_.free_host(memory) : driver_.free(pointer(memory));
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

/// Places managed memory on the GPU and clears it. The stream on which kernels run may be captured by another thread
/// meanwhile, and is left alone.
void CudaMemory::prepare(std::byte* memory, std::size_t bytes) {
  const CudaDriver::Pointer address = pointer(memory);
  driver_.check(driver_.advise(address, bytes, CudaDriver::kPreferredLocation, device_), "place memory");
  driver_.advise(address, bytes, CudaDriver::kAccessedBy, CudaDriver::kHost);  // a hint, which not all machines take
  driver_.check(driver_.prefetch(address, bytes, device_, copies_.handle()), "place memory");
  driver_.check(driver_.clear(address, 0, bytes, copies_.handle()), "clear memory");
  copies_.synchronize("clear memory");
}

std::byte* CudaMemory::allocate(std::size_t bytes) {
  const std::size_t size = std::max(bytes, std::size_t{1});
  if (size > free_bytes()) throw OutOfMemory(bytes);  // what is more than free would be paged
  CudaDriver::Pointer address = 0;
  check_allocation(driver_.allocate_managed(&address, size, kAttachGlobal), bytes);
  auto* memory = reinterpret_cast<std::byte*>(address);
  try {
    prepare(memory, size);
    const std::lock_guard lock(mutex_);
    parts_.emplace(memory, Part{size, false});
  } catch (...) {
    driver_.free(address);
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

void CudaMemory::settle() {
  context_.use();
  const std::lock_guard lock(mutex_);
  for (const auto& [memory, part] : parts_)
    if (!part.is_exchanged)
      driver_.check(driver_.prefetch(pointer(memory), part.bytes, device_, stream_.handle()), "move memory");
  stream_.synchronize("move memory");
}

void CudaMemory::settle(const std::byte* memory, std::size_t bytes) {
  context_.use();
  driver_.check(driver_.prefetch(pointer(memory), bytes, device_, copies_.handle()), "move memory");
  copies_.synchronize("move memory");
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
  const bool to_gpu = is_on_gpu(to), from_gpu = is_on_gpu(from);
  if (to_gpu || from_gpu) context_.use();
  for (std::int64_t i = 0; i < pieces.count; i++, to += pieces.stride, from += pieces.stride) {
    if (to_gpu && from_gpu)
      driver_.check(driver_.copy_within(pointer(to), pointer(from), pieces.bytes, stream_.handle()), "copy memory");
    else if (to_gpu)
      driver_.check(driver_.copy_to(pointer(to), from, pieces.bytes, copies_.handle()), "copy memory");
    else if (from_gpu)
      driver_.check(driver_.copy_from(to, pointer(from), pieces.bytes, copies_.handle()), "copy memory");
    else
      std::memcpy(to, from, pieces.bytes);
  }
  if (to_gpu && from_gpu) stream_.synchronize("copy memory");
  if (to_gpu != from_gpu) copies_.synchronize("copy memory");
}

void CudaMemory::write(std::byte* to, const void* from, std::size_t bytes) const {
  driver_.check(driver_.copy_to(pointer(to), from, bytes, stream_.handle()), "write memory");
}

void CudaMemory::clear(std::byte* memory, const Pieces& pieces) const {
  if (!is_on_gpu(memory)) {
    for (std::int64_t i = 0; i < pieces.count; i++, memory += pieces.stride) std::memset(memory, 0, pieces.bytes);
    return;
  }
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
