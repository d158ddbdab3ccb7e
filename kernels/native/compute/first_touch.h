#pragma once

#include <cstddef>

#include "compute/thread_pool.h"

namespace quire {

/// Makes the memory resident, its contents kept, whatever others write to it meanwhile. Linux puts a page on the node
/// that touches it first.
void touch_pages(std::byte* begin, std::byte* end);

/// Touches all of the memory, each part by a thread of the node in whose share (ThreadPool::share_begin) it is.
void touch_by_node(ThreadPool& pool, std::byte* memory, std::size_t bytes);

}  // namespace quire
