#pragma once

#include <filesystem>
#include <vector>

namespace quire {

inline constexpr int kMaxThreads = 1024;

/// CPUs that this process may run on, ascending: its affinity mask. Empty where the system cannot say.
std::vector<int> affinity_cpus();

/// CPUs that this process may use at once: its affinity mask, limited by the CPU quotas (rounded up) of its cgroup
/// and of all cgroups above it, version 1 or 2. At least 1. `root` is where /proc and /sys are found.
int available_cpus(const std::filesystem::path& root = "/");

/// Threads to compute with: the environment variable QUIRE_THREADS if it is set, else one for each physical core of the
/// affinity mask, up to `available_cpus(root)`: two on one core would share its vector units, and be no faster.
/// Throws std::invalid_argument if QUIRE_THREADS is no integer in [1, kMaxThreads].
int default_threads(const std::filesystem::path& root = "/");

}  // namespace quire
