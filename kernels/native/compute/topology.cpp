#include "compute/topology.h"

#include <pthread.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "compute/cpu_count.h"
#if defined(__linux__)
#include <sched.h>
#endif

namespace quire {
namespace {

namespace fs = std::filesystem;

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

}  // namespace

std::vector<Place> physical_cores(const std::vector<int>& cpus, const fs::path& root) {
  const std::map<int, int> nodes = nodes_of_cpus(root);
  std::map<std::pair<int, int>, Place> cores;  // by node and first sibling, which need not be in `cpus`
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

bool set_affinity([[maybe_unused]] std::thread::native_handle_type thread, const std::vector<int>& cpus) {
  if (cpus.empty()) return true;
#if defined(__linux__)
  std::vector<cpu_set_t> mask(*std::ranges::max_element(cpus) / CPU_SETSIZE + 1);
  const std::size_t bytes = mask.size() * sizeof(cpu_set_t);
  for (int cpu : cpus) CPU_SET_S(cpu, bytes, mask.data());
  return pthread_setaffinity_np(thread, bytes, mask.data()) == 0;
#else
  return false;
#endif
}

ScopedAffinity::ScopedAffinity(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  before_ = affinity_cpus();
  if (!set_affinity(pthread_self(), cpus)) before_.clear();
}

ScopedAffinity::~ScopedAffinity() { set_affinity(pthread_self(), before_); }

}  // namespace quire
