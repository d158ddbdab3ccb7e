#include "compute/cpu_device.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <latch>
#include <optional>
#include <stdexcept>
#include <utility>

namespace quire {
namespace {

constexpr std::int64_t kChunksPerThread = 8;
constexpr std::int64_t kItemsPerThread = 2;  // attention items; with fewer, threads would wait for each other

}  // namespace

CpuDevice::CpuDevice(ThreadPool& threads) : Device(threads) {
  for (int thread = 0; threads.nodes() > 1 && thread < threads.size(); thread++)
    if (std::cmp_equal(threads.place(thread).node, places_.size())) places_.push_back(&threads.place(thread));
}

std::byte* CpuDevice::allocate_matrix(std::size_t bytes) {
  std::byte* memory = allocate(bytes);
  if (threads().nodes() > 1) touch_by_node(threads(), memory, bytes, touch_pages);
  return memory;
}

void CpuDevice::place_matrix(std::byte* memory, std::size_t bytes) const {
  touch_by_node(threads(), memory, bytes, touch_huge_pages);
}

std::byte* CpuDevice::map_file(int fd, std::size_t bytes, bool writable) {
  const std::span<std::byte> memory = files_.emplace_back(fd, bytes, writable).memory();
  if (!writable) read_pages(memory);
  return memory.data();
}

void CpuDevice::make_read_only(std::byte* memory) {
  const auto file = std::ranges::find(files_, memory, [](const FileMapping& each) { return each.memory().data(); });
  if (file == files_.end()) throw std::invalid_argument("no file is mapped at this address");
  touch_huge_pages(memory, memory + file->memory().size());
  file->make_read_only();
}

void CpuDevice::check(const void* address, std::size_t bytes) const {
  const auto holds = [&](const FileMapping& file) { return lies_within(address, bytes, file.memory()); };
  if (std::ranges::none_of(files_, holds)) arena_.check(address, bytes);
}

void CpuDevice::touch(std::byte* begin, std::byte* end, std::int64_t head) const {
  std::optional<ScopedAffinity> affinity;
  if (!places_.empty()) affinity.emplace(places_[static_cast<std::size_t>(head) % places_.size()]->cpus);
  touch_huge_pages(begin, end);
}

void CpuDevice::copy(std::byte* to, const std::byte* from, const Pieces& pieces) const {
  for (std::int64_t i = 0; i < pieces.count; i++, to += pieces.stride, from += pieces.stride)
    std::memcpy(to, from, pieces.bytes);
}

void CpuDevice::clear(std::byte* memory, const Pieces& pieces) const {
  for (std::int64_t i = 0; i < pieces.count; i++, memory += pieces.stride) std::memset(memory, 0, pieces.bytes);
}

std::int64_t CpuDevice::busy_items() const { return threads().size() == 1 ? 0 : kItemsPerThread * threads().size(); }

void CpuDevice::reset(std::size_t num_launches) {
  const std::size_t shares = static_cast<std::size_t>(threads().nodes()) * num_launches;
  if (taken_.size() < shares) taken_ = std::vector<std::atomic<std::int64_t>>(shares);
  if (done_.size() < num_launches) done_ = std::vector<std::atomic<std::int64_t>>(num_launches);
  for (std::size_t i = 0; i < shares; i++) taken_[i].store(0, std::memory_order_relaxed);
  for (std::size_t i = 0; i < num_launches; i++) done_[i].store(0, std::memory_order_relaxed);
  finished_.reset(0);
}

/// Does one thread's share of the launches. The thread that finishes the last item of launch i calls on_done(i).
template <class OnDone>
void CpuDevice::work(std::span<const Launch> launches, int thread, const Dims& dims, OnDone on_done) {
  const auto count = static_cast<std::uint32_t>(launches.size());
  for (std::uint32_t i = finished_.load(); i < count; i++) {  // a late thread joins the current launch
    const std::int64_t items = launches[i].items(dims);
    if (items == 0) continue;
    const std::int64_t computed = compute(launches, i, thread, items, dims);
    if (computed && done_[i].fetch_add(computed, std::memory_order_acq_rel) + computed == items) {
      on_done(i);
      finished_.store(i + 1);
    } else {
      for (std::uint32_t seen; (seen = finished_.load()) <= i;) threads().wait_while(finished_, seen);
    }
  }
}

void CpuDevice::run(const Plan& plan, const Dims& dims) {
  const std::span<const Launch> launches = plan.launches();
  reset(launches.size());
  threads().run([&](int thread) { work(launches, thread, dims, [](std::size_t) {}); });
}

std::vector<double> CpuDevice::profile(const Plan& plan, const Dims& dims) {
  using Clock = std::chrono::steady_clock;
  const std::span<const Launch> launches = plan.launches();
  std::vector<Clock::time_point> begins(static_cast<std::size_t>(threads().size())), ends(launches.size());
  std::latch all_here(threads().size());
  reset(launches.size());
  threads().run([&](int thread) {
    all_here.arrive_and_wait();
    begins[static_cast<std::size_t>(thread)] = Clock::now();
    work(launches, thread, dims, [&](std::size_t launch) { ends[launch] = Clock::now(); });
  });
  std::vector<double> seconds;
  Clock::time_point last = *std::ranges::min_element(begins);
  for (const Clock::time_point end : ends) {
    const Clock::time_point done = std::max(last, end);  // a launch without items has no end
    seconds.push_back(std::chrono::duration<double>(done - std::exchange(last, done)).count());
  }
  return seconds;
}

/// Computes chunks of a launch until none is left. Returns the number of items computed.
std::int64_t CpuDevice::compute(std::span<const Launch> launches, std::size_t launch, int thread, std::int64_t items,
                                const Dims& dims) {
  const ThreadPool& pool = threads();
  const auto kernel = reinterpret_cast<Kernel>(launches[launch].kernel);
  const std::vector<void*>& buffers = launches[launch].buffers;
  const std::int64_t chunk = std::max<std::int64_t>(1, items / (pool.size() * kChunksPerThread));
  std::int64_t computed = 0;
  for (int i = 0, node = pool.place(thread).node; i < pool.nodes();
       i++, node = node + 1 == pool.nodes() ? 0 : node + 1) {
    const std::int64_t first = pool.share_begin(node, items), end = pool.share_begin(node + 1, items);
    auto& taken = taken_[static_cast<std::size_t>(node) * launches.size() + launch];
    for (std::int64_t begin; (begin = first + taken.fetch_add(chunk, std::memory_order_relaxed)) < end;) {
      const std::int64_t chunk_end = std::min(begin + chunk, end);
      kernel(buffers.data(), dims.data(), begin, chunk_end);
      computed += chunk_end - begin;
    }
  }
  return computed;
}

}  // namespace quire
