#pragma once

#include <cstddef>

#include "compute/thread_pool.h"

namespace quire {

/// Makes the memory resident and keeps its contents, even if other threads write to it concurrently. Linux places a
/// page on the NUMA node that touches it first.
void touch_pages(std::byte* begin, std::byte* end);

/// Touches all of the memory, each share (ThreadPool::share_begin) from a thread of its NUMA node.
void touch_by_node(ThreadPool& pool, std::byte* memory, std::size_t bytes);

}  // namespace quire
