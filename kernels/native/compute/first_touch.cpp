#include "compute/first_touch.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <latch>

namespace quire {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

void touch_pages(std::byte* begin, std::byte* end) {
  if (begin >= end) return;
  begin -= reinterpret_cast<std::uintptr_t>(begin) % kPage;
#if defined(MADV_POPULATE_WRITE)
  if (madvise(begin, static_cast<std::size_t>(end - begin), MADV_POPULATE_WRITE) == 0) return;
#endif
  for (; begin < end; begin += kPage)  // kernels before Linux 5.14
    __atomic_fetch_add(reinterpret_cast<std::uint8_t*>(begin), 0, __ATOMIC_RELAXED);
}

void touch_by_node(ThreadPool& pool, std::byte* memory, std::size_t bytes) {
  const std::size_t threads = static_cast<std::size_t>(pool.size()), pages = (bytes + kPage - 1) / kPage;
  std::latch left(pool.size());
  pool.run([&](int thread) {
    const ScopedAffinity affinity(pool.place(thread).cpus);
    // Threads are numbered node by node, so this is a part of the node's share.
    const std::size_t index = static_cast<std::size_t>(thread);
    touch_pages(memory + pages * index / threads * kPage,
                memory + std::min(bytes, pages * (index + 1) / threads * kPage));
    left.count_down();
    if (thread == 0) left.wait();  // so that every thread takes part
  });
}

}  // namespace quire
