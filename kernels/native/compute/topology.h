#pragma once

#include <filesystem>
#include <thread>
#include <vector>

namespace quire {

inline constexpr int kMaxThreads = 1024;

/// CPUs of one NUMA node: the hardware threads of a core, or the CPUs that a thread is bound to (as in OpenMP).
struct Place {
  int node;
  std::vector<int> cpus;
};

/// Returns the affinity mask of this process as CPU numbers, ascending. Empty if the system does not report it.
std::vector<int> affinity_cpus();

/// Returns the number of CPUs that this process may use concurrently: the affinity mask, limited by the CPU quotas
/// (rounded up) of its cgroup and of all parent cgroups, version 1 or 2. At least 1. /proc and /sys are read below
/// `root`.
int available_cpus(const std::filesystem::path& root = "/");

/// Returns the default number of compute threads: the environment variable QUIRE_THREADS if it is set, otherwise one
/// for each physical core of the affinity mask, at most `available_cpus(root)`. Two threads on one core would share its
/// vector units and be no faster. Throws std::invalid_argument if QUIRE_THREADS is not an integer in [1, kMaxThreads].
int default_threads(const std::filesystem::path& root = "/");

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
