#include "compute/cuda_device.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "compute/arena.h"

namespace quire {
namespace {

constexpr unsigned kAttachGlobal = 1;      // CU_MEM_ATTACH_GLOBAL
constexpr std::int64_t kMostThreads = 32;  // of a block: items have many registers
constexpr std::size_t kChunk = std::size_t{1} << 20;

}  // namespace

/// Chunks stay where they are, so addresses are good until `reset`.
class CudaDevice::StepMemory {
 public:
  explicit StepMemory(CudaDevice& device) : device_(device) {}

  void reset() { chunk_ = 0, used_ = 0; }

  /// Copies values into memory of the step; returns their address.
  CudaDriver::Pointer add(const void* values, std::size_t bytes) {
    const std::size_t size = (bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
    while (chunk_ < chunks_.size() && used_ + size > chunks_[chunk_].size()) chunk_++, used_ = 0;
    if (chunk_ == chunks_.size()) {
      const std::size_t most = std::max(size, kChunk);
      chunks_.emplace_back(device_.allocate(most), most);
    }
    std::byte* at = chunks_[chunk_].data() + used_;
    std::memcpy(at, values, bytes);
    used_ += size;
    return reinterpret_cast<CudaDriver::Pointer>(at);
  }

 private:
  CudaDevice& device_;
  std::vector<std::span<std::byte>> chunks_;
  std::size_t chunk_ = 0, used_ = 0;
};

std::vector<std::string> CudaDevice::names() {
  const CudaDriver& driver = CudaDriver::get();
  int count = 0;
  driver.check(driver.device_count(&count), "count the GPUs");
  std::vector<std::string> names;
  for (int ordinal = 0; ordinal < count; ordinal++) {
    CudaDriver::Device device = 0;
    std::array<char, 256> name{};
    driver.check(driver.device_get(&device, ordinal), "find the GPU");
    driver.check(driver.device_name(name.data(), static_cast<int>(name.size()) - 1, device), "name the GPU");
    names.emplace_back(name.data());
  }
  return names;
}

CudaDevice::CudaDevice(int ordinal, ThreadPool& threads) : Device(threads), driver_(CudaDriver::get()) {
  const std::vector<std::string> there = names();
  if (ordinal < 0 || std::cmp_greater_equal(ordinal, there.size()))
    throw std::runtime_error("there is no GPU number " + std::to_string(ordinal) + ": this machine has " +
                             std::to_string(there.size()));
  driver_.check(driver_.device_get(&device_, ordinal), "find the GPU");
  name_ = there[static_cast<std::size_t>(ordinal)];
  const auto attribute = [&](CudaDriver::Attribute which) {
    int value = 0;
    driver_.check(driver_.device_attribute(&value, which, device_), "describe the GPU");
    return value;
  };
  if (attribute(CudaDriver::kConcurrentManagedAccess) == 0)
    throw std::runtime_error(name_ + " and the host can't access the same memory at a time, which is needed");
  multiprocessors_ = attribute(CudaDriver::kMultiprocessors);
  architecture_ = "sm_" + std::to_string(attribute(CudaDriver::kMajor)) + std::to_string(attribute(CudaDriver::kMinor));
  driver_.check(driver_.context_retain(&context_, device_), "open the GPU");
  page_lists_ = std::make_unique<StepMemory>(*this);
  operands_ = std::make_unique<StepMemory>(*this);
}

CudaDevice::~CudaDevice() {
  driver_.context_set_current(context_);
  driver_.synchronize();
  for (const CudaDriver::Handle module : modules_) driver_.module_unload(module);
  for (const std::span<std::byte> memory : memory_) driver_.free(reinterpret_cast<CudaDriver::Pointer>(memory.data()));
  driver_.context_release(device_);
}

std::size_t CudaDevice::free_memory() const {
  std::size_t free = 0, total = 0;
  driver_.check(driver_.context_set_current(context_), "use the GPU");
  driver_.check(driver_.memory_info(&free, &total), "tell its memory");
  return free;
}

std::uintptr_t CudaDevice::load(const std::string& ptx, const std::string& entry) {
  driver_.check(driver_.context_set_current(context_), "use the GPU");
  CudaDriver::Handle module = nullptr, function = nullptr;
  driver_.check(driver_.module_load(&module, ptx.c_str()), "compile a kernel");
  {
    const std::lock_guard lock(mutex_);
    modules_.push_back(module);
  }
  driver_.check(driver_.module_function(&function, module, entry.c_str()), "find a kernel");
  return reinterpret_cast<std::uintptr_t>(function);
}

std::byte* CudaDevice::allocate(std::size_t bytes) {
  CudaDriver::Pointer address = 0;
  driver_.check(driver_.context_set_current(context_), "use the GPU");
  const std::size_t size = std::max(bytes, std::size_t{1});
  if (driver_.allocate_managed(&address, size, kAttachGlobal) != 0) throw OutOfMemory(bytes);
  auto* memory = reinterpret_cast<std::byte*>(address);
  {
    const std::lock_guard lock(mutex_);
    memory_.emplace_back(memory, size);
  }
  driver_.check(driver_.clear(address, 0, size), "clear memory");
  driver_.check(driver_.synchronize(), "clear memory");
  return memory;
}

std::byte* CudaDevice::map_file(int, std::size_t, bool) {
  throw std::runtime_error("a GPU can't use memory of files, which engines share or leave to the next one");
}

void CudaDevice::make_read_only(std::byte*) { throw std::invalid_argument("no file is mapped at this address"); }

void CudaDevice::check(const void* address, std::size_t bytes) const {
  const auto holds = [&](std::span<const std::byte> memory) { return lies_within(address, bytes, memory); };
  const std::lock_guard lock(mutex_);
  if (std::ranges::none_of(memory_, holds))
    throw std::invalid_argument("these " + std::to_string(bytes) + " bytes are not memory of the device");
}

std::span<const std::byte> CudaDevice::read(std::span<const std::byte> memory, std::vector<std::byte>& buffer) const {
  buffer.resize(memory.size());
  copy(buffer.data(), memory.data(), {memory.size()});
  return buffer;
}

void CudaDevice::copy(std::byte* to, const std::byte* from, const Pieces& pieces) const {
  for (std::int64_t i = 0; i < pieces.count; i++, to += pieces.stride, from += pieces.stride)
    std::memcpy(to, from, pieces.bytes);
}

void CudaDevice::clear(std::byte* memory, const Pieces& pieces) const {
  for (std::int64_t i = 0; i < pieces.count; i++, memory += pieces.stride) std::memset(memory, 0, pieces.bytes);
}

void CudaDevice::begin_step() { page_lists_->reset(); }

PageList CudaDevice::page_list(std::span<const std::int32_t> pages) {
  return static_cast<PageList>(page_lists_->add(pages.data(), pages.size_bytes()));
}

std::int64_t CudaDevice::busy_items() const { return kMostThreads * multiprocessors_; }

void CudaDevice::launch(const Launch& launch, CudaDriver::Pointer buffers, CudaDriver::Pointer dims,
                        std::int64_t items) const {
  // All multiprocessors before many threads of one.
  const std::int64_t threads =
      std::clamp((items + multiprocessors_ - 1) / multiprocessors_, std::int64_t{1}, kMostThreads);
  std::array<void*, 3> parameters = {&buffers, &dims, &items};
  driver_.check(driver_.launch(reinterpret_cast<CudaDriver::Handle>(launch.kernel),
                               static_cast<unsigned>((items + threads - 1) / threads), 1, 1,
                               static_cast<unsigned>(threads), 1, 1, 0, nullptr, parameters.data(), nullptr),
                "launch a kernel");
}

template <class OnLaunched>
void CudaDevice::run_launches(const Plan& plan, const Dims& dims, OnLaunched on_launched) {
  driver_.check(driver_.context_set_current(context_), "use the GPU");
  operands_->reset();
  const CudaDriver::Pointer dims_there = operands_->add(dims.data(), sizeof dims);
  std::vector<CudaDriver::Pointer> buffers;
  for (const Launch& each : plan.launches())
    buffers.push_back(operands_->add(each.buffers.data(), each.buffers.size() * sizeof(void*)));
  for (std::size_t i = 0; i < buffers.size(); i++) {
    const std::int64_t items = plan.launches()[i].items(dims);
    if (items > 0) launch(plan.launches()[i], buffers[i], dims_there, items);
    on_launched();
  }
  driver_.check(driver_.synchronize(), "run a step");
}

void CudaDevice::run(const Plan& plan, const Dims& dims) {
  run_launches(plan, dims, [] {});
}

std::vector<double> CudaDevice::profile(const Plan& plan, const Dims& dims) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> seconds;
  Clock::time_point last = Clock::now();
  run_launches(plan, dims, [&] {
    driver_.check(driver_.synchronize(), "run a kernel");
    const Clock::time_point done = Clock::now();
    seconds.push_back(std::chrono::duration<double>(done - last).count());
    last = done;
  });
  return seconds;
}

}  // namespace quire
