#pragma once

#include <filesystem>
#include <thread>
#include <vector>

namespace quire {

/// CPUs of one NUMA node: the hardware threads of a core, or those that a thread is bound to.
struct Place {
  int node;
  std::vector<int> cpus;
};

/// The physical cores that `cpus` belong to, node by node, of each those of its hardware threads that are among them.
/// `root` is where /sys is found; a CPU that it does not describe counts as a core of node 0.
std::vector<Place> physical_cores(const std::vector<int>& cpus, const std::filesystem::path& root = "/");

/// Places for `threads` threads, node by node, spread evenly over the cores, or over the CPUs where there are more
/// threads than cores. Nodes are counted from 0. With `pin` every thread is bound to a CPU of its own; without, to all
/// CPUs of its node if threads are on several, and else to none. Where CPUs are too few all are on one node, unbound.
std::vector<Place> place_threads(int threads, bool pin, const std::vector<Place>& cores);

/// Binds a thread to these CPUs; does nothing if there are none. Returns whether the system has allowed it.
bool bind_to(std::thread::native_handle_type thread, const std::vector<int>& cpus);

/// Binds the calling thread to these CPUs while it lives, if the system allows it; does nothing if there are none.
class StayOn {
 public:
  explicit StayOn(const std::vector<int>& cpus);
  ~StayOn();
  StayOn(const StayOn&) = delete;
  StayOn& operator=(const StayOn&) = delete;

 private:
  std::vector<int> before_;  ///< where it could run before; empty if it has not been bound
};

}  // namespace quire
