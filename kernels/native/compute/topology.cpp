#include "compute/topology.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace quire {
namespace {

namespace fs = std::filesystem;

constexpr int kMostCpus = 1 << 20;

/// Parses a CPU list of the kernel, such as `0-3,8`. Returns no numbers if the file is missing or malformed.
std::vector<int> read_list(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  std::vector<int> numbers;
  for (const char *at = line.data(), *end = at + line.size(); at < end;) {
    int first = 0;
    auto [rest, error] = std::from_chars(at, end, first);
    if (error != std::errc() || first < 0) return {};
    int last = first;
    if (rest < end && *rest == '-') {
      const auto range = std::from_chars(rest + 1, end, last);
      if (range.ec != std::errc()) return {};
      rest = range.ptr;
    }
    for (int number = first; number <= last; ++number) numbers.push_back(number);
    at = rest + 1;  // past the comma
  }
  return numbers;
}

std::map<int, int> nodes_of_cpus(const fs::path& root) {
  std::map<int, int> nodes;
  const fs::path folder = root / "sys/devices/system/node";
  for (int node : read_list(folder / "online"))
    for (int cpu : read_list(folder / ("node" + std::to_string(node)) / "cpulist")) nodes[cpu] = node;
  return nodes;
}

int first_sibling(int cpu, const fs::path& root) {
  const fs::path folder = root / "sys/devices/system/cpu" / ("cpu" + std::to_string(cpu)) / "topology";
  const std::vector<int> siblings = read_list(folder / "thread_siblings_list");
  return siblings.empty() ? cpu : *std::ranges::min_element(siblings);
}

std::vector<int> cpus_of_node(const std::vector<Place>& cores, int node) {
  std::vector<int> cpus;
  for (const Place& core : cores)
    if (core.node == node) cpus.insert(cpus.end(), core.cpus.begin(), core.cpus.end());
  return cpus;
}

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

std::vector<Place> physical_cores(const std::vector<int>& cpus, const fs::path& root) {
  const std::map<int, int> nodes = nodes_of_cpus(root);
  std::map<std::pair<int, int>, Place> cores;  // keys: node and first sibling, which need not be in `cpus`
  for (int cpu : cpus) {
    const auto found = nodes.find(cpu);
    const int node = found == nodes.end() ? 0 : found->second;
    Place& core = cores[{node, first_sibling(cpu, root)}];
    core.node = node;
    core.cpus.push_back(cpu);
  }
  std::vector<Place> result;
  for (auto& [key, core] : cores) {
    std::ranges::sort(core.cpus);
    result.push_back(std::move(core));
  }
  return result;
}

std::vector<Place> place_threads(int threads, bool pin, const std::vector<Place>& cores) {
  if (threads < 1 || threads > kMaxThreads)
    throw std::invalid_argument("threads=" + std::to_string(threads) + " is out of range; give 1 to " +
                                std::to_string(kMaxThreads));
  const auto count = static_cast<std::size_t>(threads);
  std::vector<Place> seats;
  for (std::size_t level = 0; seats.size() < count; ++level) {  // first the first hardware thread of every core
    std::vector<Place> row;
    for (const Place& core : cores)
      if (core.cpus.size() > level) row.push_back({core.node, {core.cpus[level]}});
    if (row.empty()) return std::vector<Place>(count, Place{0, {}});
    const std::size_t taken = std::min(count - seats.size(), row.size());
    for (std::size_t i = 0; i < taken; ++i) seats.push_back(row[i * row.size() / taken]);
  }
  std::ranges::stable_sort(seats, {}, &Place::node);
  const bool one_node = seats.front().node == seats.back().node;
  if (!pin)
    for (Place& seat : seats) seat.cpus = one_node ? std::vector<int>() : cpus_of_node(cores, seat.node);
  int node = 0, system_node = seats.front().node;
  for (Place& seat : seats) {
    if (std::exchange(system_node, seat.node) != seat.node) ++node;
    seat.node = node;
  }
  return seats;
}

bool set_affinity(std::thread::native_handle_type thread, const std::vector<int>& cpus) {
  if (cpus.empty()) return true;
  const auto [least, most] = std::ranges::minmax(cpus);
  if (least < 0 || most > kMostCpus) return false;
  std::vector<cpu_set_t> mask(static_cast<std::size_t>(most) / CPU_SETSIZE + 1);
  const std::size_t bytes = mask.size() * sizeof(cpu_set_t);
  for (int cpu : cpus) CPU_SET_S(cpu, bytes, mask.data());
  return pthread_setaffinity_np(thread, bytes, mask.data()) == 0;
}

ScopedAffinity::ScopedAffinity(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  before_ = affinity_cpus();
  if (!set_affinity(pthread_self(), cpus)) before_.clear();
}

ScopedAffinity::~ScopedAffinity() { set_affinity(pthread_self(), before_); }

std::vector<int> affinity_cpus() {
  std::vector<int> cpus;
  // The kernel rejects a mask that is smaller than its own with EINVAL, so the mask grows until it fits.
  for (int max_cpus = 1024; max_cpus <= kMostCpus; max_cpus *= 2) {
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
