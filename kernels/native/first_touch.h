#pragma once

#include <cstddef>

#include "thread_pool.h"

namespace quire {

/// Touches every page of the memory, contents kept, by a thread of the node in whose share (ThreadPool::share_begin) it
/// is. Linux puts a page on the node that touches it first.
void touch_by_node(ThreadPool& pool, std::byte* memory, std::size_t bytes);

}  // namespace quire
