#include "compute/cpu_count.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include "compute/topology.h"

#if defined(__linux__)
#include <sched.h>

#include <cerrno>
#endif

namespace quire {
namespace {

namespace fs = std::filesystem;

/// Returns the CPUs that one cgroup grants: quota / period, rounded up; kMaxThreads if it sets no quota.
int quota_cpus(std::istream& quota_file, std::istream& period_file) {
  long long quota = 0, period = 0;
  // A missing file, "max" (version 2) and -1 (version 1) all mean no limit.
  if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return kMaxThreads;
  return static_cast<int>(std::min<long long>((quota + period - 1) / period, kMaxThreads));
}

int quota_v2(const fs::path& folder) {
  std::ifstream file(folder / "cpu.max");  // "<quota or max> <period>"
  return quota_cpus(file, file);
}

int quota_v1(const fs::path& folder) {
  std::ifstream quota(folder / "cpu.cfs_quota_us"), period(folder / "cpu.cfs_period_us");
  return quota_cpus(quota, period);
}

/// Returns the least quota of the cgroup `name` and its parents. Inside a container the name may be that of the host,
/// and its folder missing; then only the mount point, the container's own cgroup, counts.
template <class Quota>
int least_quota(const fs::path& mount, const fs::path& name, Quota quota) {
  int least = quota(mount);
  fs::path folder = mount;
  for (const fs::path& part : name.relative_path()) least = std::min(least, quota(folder /= part));
  return least;
}

bool names_controller(std::string_view list, std::string_view controller) {
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    if (list.substr(0, comma) == controller) return true;
    list.remove_prefix(std::min(comma + 1, list.size()));
  }
  return false;
}

/// Reads /proc/self/cgroup, lines of "<id>:<controllers>:<name>"; version 2 has an empty list of controllers.
int cgroup_cpus(const fs::path& root) {
  int least = kMaxThreads;
  const fs::path mount = root / "sys/fs/cgroup";
  std::ifstream file(root / "proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string id, controllers, name;
    if (!std::getline(fields, id, ':') || !std::getline(fields, controllers, ':') || !std::getline(fields, name))
      continue;
    if (controllers.empty()) {
      least = std::min({least, least_quota(mount, name, quota_v2), least_quota(mount / "unified", name, quota_v2)});
    } else if (names_controller(controllers, "cpu")) {
      least = std::min(
          {least, least_quota(mount / controllers, name, quota_v1), least_quota(mount / "cpu", name, quota_v1)});
    }
  }
  return least;
}

}  // namespace

std::vector<int> affinity_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  // The kernel rejects a mask that is smaller than its own with EINVAL, so the mask grows until it fits.
  for (int max_cpus = 1024; max_cpus <= 1 << 20; max_cpus *= 2) {
    std::vector<cpu_set_t> mask(CPU_ALLOC_SIZE(max_cpus) / sizeof(cpu_set_t));
    const std::size_t bytes = mask.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, mask.data()) != 0) {
      if (errno == EINVAL) continue;
      break;
    }
    for (int cpu = 0; cpu < max_cpus; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, mask.data())) cpus.push_back(cpu);
    }
    break;
  }
#endif
  return cpus;
}

int available_cpus(const fs::path& root) {
  int cpus = static_cast<int>(affinity_cpus().size());
  if (cpus == 0) cpus = static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, std::min(cpus, cgroup_cpus(root)));
}

int default_threads(const fs::path& root) {
  const char* given = std::getenv("QUIRE_THREADS");
  const std::vector<Place> cores = physical_cores(affinity_cpus(), root);
  const int cpus = available_cpus(root), usable = cores.empty() ? cpus : std::min(cpus, static_cast<int>(cores.size()));
  if (given == nullptr) return usable;
  const std::string_view text(given);
  int threads = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
  if (error != std::errc() || end != text.data() + text.size() || threads < 1 || threads > kMaxThreads) {
    throw std::invalid_argument(
        "QUIRE_THREADS='" + std::string(text) + "' is not a number of threads; set an integer from 1 to " +
        std::to_string(kMaxThreads) + ", or unset it to use the " + std::to_string(usable) + " available cores");
  }
  return threads;
}

}  // namespace quire
