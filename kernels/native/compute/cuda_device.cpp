#include "compute/cuda_device.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace quire {
namespace {

constexpr int kLeastMajor = 8;                 // of the compute capability: kernels use cp.async
constexpr std::int64_t kMostThreads = 1024;    // of a block
constexpr std::int64_t kMostShared = 1 << 20;  // more than any GPU has
constexpr std::int64_t kItemsAtOnce = 32;      // of attention on a multiprocessor
constexpr std::size_t kChunk = std::size_t{1} << 20;
constexpr int kPtx = 1, kErrorLog = 5, kErrorLogSize = 6;  // CU_JIT_INPUT_PTX, CU_JIT_ERROR_LOG_BUFFER and its size

int attribute(const CudaDriver& driver, CudaDriver::Device device, CudaDriver::Attribute which) {
  int value = 0;
  driver.check(driver.device_attribute(&value, which, device), "describe the GPU");
  return value;
}

/// Returns a GPU that kernels can be compiled for, and that can access memory of the host.
CudaDriver::Device find_device(const CudaDriver& driver, int ordinal) {
  const std::vector<std::string> names = CudaDevice::names();
  if (ordinal < 0 || std::cmp_greater_equal(ordinal, names.size()))
    throw std::runtime_error("there is no GPU number " + std::to_string(ordinal) + ": this machine has " +
                             std::to_string(names.size()));
  const std::string& name = names[static_cast<std::size_t>(ordinal)];
  CudaDriver::Device device = 0;
  driver.check(driver.device_get(&device, ordinal), "find the GPU");
  const int major = attribute(driver, device, CudaDriver::kMajor),
            minor = attribute(driver, device, CudaDriver::kMinor);
  if (major < kLeastMajor)
    throw std::runtime_error(name + " has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
                             ", and " + std::to_string(kLeastMajor) + ".0 or a later one is needed");
  if (attribute(driver, device, CudaDriver::kUnifiedAddressing) == 0)
    throw std::runtime_error(name + " and the host have no addresses in common (unified addressing), which is needed");
  return device;
}

std::string architecture(const CudaDriver& driver, CudaDriver::Device device) {
  return "sm_" + std::to_string(attribute(driver, device, CudaDriver::kMajor)) +
         std::to_string(attribute(driver, device, CudaDriver::kMinor));
}

}  // namespace

/// Chunks stay where they are, so addresses are good until `reset`.
class CudaDevice::PageLists {
 public:
  explicit PageLists(CudaMemory& memory) : memory_(memory) {}

  void reset() {
    for (Chunk& chunk : chunks_) chunk.numbers.clear(), chunk.num_written = 0;
  }

  /// Returns the address that numbers will have.
  CudaDriver::Pointer add(std::span<const std::int32_t> numbers) {
    const std::size_t size = numbers.size();
    auto chunk = std::ranges::find_if(chunks_, [&](const Chunk& c) { return c.numbers.size() + size <= c.capacity; });
    if (chunk == chunks_.end()) {
      const std::size_t capacity = std::max(size, kChunk / sizeof(std::int32_t));
      chunk = chunks_.insert(chunks_.end(), {memory_.allocate(capacity * sizeof(std::int32_t)), capacity, {}, 0});
    }
    std::byte* at = chunk->memory + chunk->numbers.size() * sizeof(std::int32_t);
    chunk->numbers.insert(chunk->numbers.end(), numbers.begin(), numbers.end());
    return reinterpret_cast<CudaDriver::Pointer>(at);
  }

  /// Writes the numbers before the next kernels.
  void write() {
    for (auto& [memory, capacity, numbers, num_written] : chunks_) {
      const std::span<const std::int32_t> rest = std::span(numbers).subspan(num_written);
      if (!rest.empty()) memory_.write(memory + num_written * sizeof(std::int32_t), rest.data(), rest.size_bytes());
      num_written = numbers.size();
    }
  }

 private:
  struct Chunk {
    std::byte* memory;
    std::size_t capacity;
    std::vector<std::int32_t> numbers;
    std::size_t num_written;
  };

  CudaMemory& memory_;
  std::vector<Chunk> chunks_;
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

std::string CudaDevice::architecture_of(int ordinal) {
  const CudaDriver& driver = CudaDriver::get();
  return quire::architecture(driver, find_device(driver, ordinal));
}

CudaDevice::CudaDevice(int ordinal, ThreadPool& threads, std::filesystem::path cache_dir, Warn warn)
    : Device(threads),
      driver_(CudaDriver::get()),
      device_(find_device(driver_, ordinal)),
      name_(names()[static_cast<std::size_t>(ordinal)]),
      architecture_(quire::architecture(driver_, device_)),
      multiprocessors_(attribute(driver_, device_, CudaDriver::kMultiprocessors)),
      threads_at_once_(multiprocessors_ * attribute(driver_, device_, CudaDriver::kThreadsOfMultiprocessor)),
      context_(driver_, device_),
      stream_(driver_, context_),
      memory_(driver_, device_, context_, stream_),
      transfers_(driver_, context_, memory_),
      steps_(driver_, memory_, stream_, std::move(warn)),
      cache_(std::move(cache_dir)),
      page_lists_(std::make_unique<PageLists>(memory_)) {}

CudaDevice::~CudaDevice() {
  context_.use_if_there();
  driver_.stream_synchronize(stream_.handle());
  for (const CudaDriver::Handle module : modules_) driver_.module_unload(module);
}

/// Returns the code of the GPU that the driver makes of PTX.
std::string CudaDevice::link(const std::string& ptx) const {
  std::array<char, 4096> log{};
  std::array<int, 2> options = {kErrorLog, kErrorLogSize};
  std::array<void*, 2> values = {log.data(), reinterpret_cast<void*>(log.size())};
  CudaDriver::Handle linker = nullptr;
  driver_.check(driver_.link_create(2, options.data(), values.data(), &linker), "compile a kernel");
  void* code = nullptr;
  std::size_t size = 0;
  CudaDriver::Result result =
      driver_.link_add(linker, kPtx, const_cast<char*>(ptx.c_str()), ptx.size() + 1, "kernel", 0, nullptr, nullptr);
  if (result == 0) result = driver_.link_complete(linker, &code, &size);
  const std::string cubin = result == 0 ? std::string(static_cast<const char*>(code), size) : std::string();
  driver_.link_destroy(linker);
  log.back() = '\0';
  const std::string what = "compile a kernel" + (log[0] == '\0' ? "" : " (" + std::string(log.data()) + ")");
  driver_.check(result, what.c_str());
  return cubin;
}

std::uintptr_t CudaDevice::load(const std::string& ptx, const std::string& entry, std::int64_t threads_per_item,
                                std::int64_t threads_per_block, std::int64_t shared_bytes) {
  const auto [least, most] = std::minmax(threads_per_item, threads_per_block);
  if (least < 1 || most % least != 0 || threads_per_block > kMostThreads)
    throw std::invalid_argument("a kernel has up to " + std::to_string(kMostThreads) +
                                " threads a block, a multiple or a part of those of an item; got " +
                                std::to_string(threads_per_item) + " of an item and " +
                                std::to_string(threads_per_block) + " of a block");
  if (shared_bytes < 0 || shared_bytes > kMostShared)
    throw std::invalid_argument("a block has up to " + std::to_string(kMostShared) + " bytes of shared memory; got " +
                                std::to_string(shared_bytes));
  context_.use();
  int version = 0;
  driver_.check(driver_.driver_version(&version), "tell the driver's version");
  const std::string cubin =
      cache_.get({ptx, architecture_, "driver " + std::to_string(version)}, ".cubin", [&] { return link(ptx); });
  CudaDriver::Handle module = nullptr, function = nullptr;
  driver_.check(driver_.module_load(&module, cubin.data()), "load a kernel");
  {
    const std::lock_guard lock(mutex_);
    modules_.push_back(module);
  }
  driver_.check(driver_.module_function(&function, module, entry.c_str()), "find a kernel");
  int local_bytes = 0;
  driver_.check(driver_.function_get(&local_bytes, CudaDriver::kLocalBytes, function), "tell what a kernel takes");
  const std::string share = "give a block of threads " + std::to_string(shared_bytes) + " bytes of shared memory";
  if (shared_bytes > 0)
    driver_.check(driver_.function_set(function, CudaDriver::kMostSharedBytes, static_cast<int>(shared_bytes)),
                  share.c_str());
  const std::lock_guard lock(mutex_);
  local_bytes_ = std::max(local_bytes_, std::int64_t{local_bytes});
  return reinterpret_cast<std::uintptr_t>(&kernels_.emplace_back(
      CudaKernel{function, threads_per_item, threads_per_block, static_cast<unsigned>(shared_bytes)}));
}

std::size_t CudaDevice::thread_memory() const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(local_bytes_ * threads_at_once_);
}

std::byte* CudaDevice::map_file(int, std::size_t, bool) {
  throw std::runtime_error("a GPU can't use memory of files, which engines share or leave to the next one");
}

void CudaDevice::make_read_only(std::byte*) { throw std::invalid_argument("no file is mapped at this address"); }

void CudaDevice::check(const void* address, std::size_t bytes) const {
  if (!memory_.holds(address, bytes))
    throw std::invalid_argument("these " + std::to_string(bytes) + " bytes are not memory of the device");
}

void CudaDevice::begin_step() { page_lists_->reset(); }

PageList CudaDevice::page_list(std::span<const std::int32_t> pages) {
  return static_cast<PageList>(page_lists_->add(pages));
}

std::int64_t CudaDevice::busy_items() const { return kItemsAtOnce * multiprocessors_; }

void CudaDevice::launch(const Launch& launch, const CudaStep& step, const CudaStep::Part& part) const {
  if (part.most_items == 0) return;
  const auto& kernel = *reinterpret_cast<const CudaKernel*>(launch.kernel);
  const CudaKernel::Grid grid = kernel.grid(part.most_items, multiprocessors_);
  std::array<CudaDriver::Pointer, 3> values = {part.buffers, step.dims_address, part.items};
  std::array<void*, 3> parameters = {&values[0], &values[1], &values[2]};
  driver_.check(driver_.launch(kernel.function, grid.blocks, 1, 1, grid.threads, 1, 1, kernel.shared_bytes,
                               stream_.handle(), parameters.data(), nullptr),
                "launch a kernel");
}

void CudaDevice::run(const Plan& plan, const Dims& dims) {
  context_.use();
  page_lists_->write();
  CudaStep& step = steps_.get(plan, dims);
  steps_.launch(step, [&] {
    for (std::size_t i = 0; i < step.parts.size(); i++) launch(plan.launches()[i], step, step.parts[i]);
  });
  stream_.synchronize("run a step");
}

std::vector<double> CudaDevice::profile(const Plan& plan, const Dims& dims) {
  using Clock = std::chrono::steady_clock;
  context_.use();
  page_lists_->write();
  const CudaStep& step = steps_.get(plan, dims);
  std::vector<double> seconds;
  stream_.synchronize("run a step");
  Clock::time_point last = Clock::now();
  for (std::size_t i = 0; i < step.parts.size(); i++) {
    launch(plan.launches()[i], step, step.parts[i]);
    stream_.synchronize("run a kernel");
    const Clock::time_point done = Clock::now();
    seconds.push_back(std::chrono::duration<double>(done - std::exchange(last, done)).count());
  }
  return seconds;
}

}  // namespace quire
