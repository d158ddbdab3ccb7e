#include "first_touch.h"

#include <algorithm>
#include <latch>

namespace quire {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

void touch_by_node(ThreadPool& pool, std::byte* memory, std::size_t bytes) {
  const std::size_t threads = static_cast<std::size_t>(pool.size()), pages = (bytes + kPage - 1) / kPage;
  std::latch left(pool.size());
  pool.run([&](int thread) {
    const StayOn stay(pool.place(thread).cpus);
    // A thread's part of its node's share: threads are numbered node by node.
    const std::size_t index = static_cast<std::size_t>(thread);
    for (std::size_t page = pages * index / threads; page < pages * (index + 1) / threads; page++) {
      volatile std::byte& first = memory[page * kPage];
      first = std::byte{first};
    }
    left.count_down();
    if (thread == 0) left.wait();  // so that no thread comes too late
  });
}

}  // namespace quire
