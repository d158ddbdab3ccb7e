#pragma once

#include <filesystem>
#include <thread>
#include <vector>

namespace quire {

/// CPUs of one NUMA node: the hardware threads of a core, or the CPUs that a thread is bound to (as in OpenMP).
struct Place {
  int node;
  std::vector<int> cpus;
};

/// Returns the physical cores that `cpus` belong to, node by node, each with the hardware threads that are in `cpus`.
/// /sys is read below `root`; a CPU that it does not describe counts as a core of node 0.
std::vector<Place> physical_cores(const std::vector<int>& cpus, const std::filesystem::path& root = "/");

/// Returns a place for each of `threads` threads, node by node, spread evenly over the cores, or over the CPUs if there
/// are more threads than cores. Nodes are renumbered from 0. With `pin` every thread is bound to a CPU of its own.
/// Otherwise it is bound to all CPUs of its node if the threads span several nodes, and unbound if they do not. With
/// fewer CPUs than threads, all threads are unbound and count as one node.
std::vector<Place> place_threads(int threads, bool pin, const std::vector<Place>& cores);

/// Binds a thread to the CPUs, or does nothing if there are none. Returns false if the system does not allow it.
bool set_affinity(std::thread::native_handle_type thread, const std::vector<int>& cpus);

/// Binds the calling thread to the CPUs during its lifetime, if the system allows it; does nothing if there are none.
class ScopedAffinity {
 public:
  explicit ScopedAffinity(const std::vector<int>& cpus);
  ~ScopedAffinity();
  ScopedAffinity(const ScopedAffinity&) = delete;
  ScopedAffinity& operator=(const ScopedAffinity&) = delete;

 private:
  std::vector<int> before_;  ///< the thread's previous affinity; empty if it was not changed
};

}  // namespace quire
