#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "compute/arena.h"
#include "compute/thread_pool.h"
#include "compute/topology.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

double launch_time(ThreadPool& pool, int launches) {
  if (launches < 1) throw std::invalid_argument("launches=" + std::to_string(launches) + "; give at least 1");
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < launches; ++i) pool.run([](int) {});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / launches;
}

void run_callable(ThreadPool& pool, const nb::typed<nb::callable, nb::object(int)>& function) {
  const nb::gil_scoped_release release;
  pool.run([&](int thread) {
    const nb::gil_scoped_acquire acquire;
    function(thread);
  });
}

}  // namespace

void bind_threads(nb::module_& m) {
  m.def(
      "default_threads", [](const std::string& root) { return default_threads(root); }, "root"_a = "/",
      "Return QUIRE_THREADS, or the number of cores that the affinity mask and the cgroup quota (read below `root`) "
      "grant.");
  m.def("affinity_cpus", &affinity_cpus, "Return the CPUs that this process may run on.");
  m.def("request_amx", &ThreadPool::request_amx,
        "Ask the kernel for permission to use AMX tiles; return True if it is granted.");
  nb::class_<Place>(m, "Place", "CPUs of one NUMA node: the hardware threads of a core, or where a thread is bound.")
      .def(nb::init<int, std::vector<int>>(), "node"_a, "cpus"_a)
      .def_ro("node", &Place::node)
      .def_ro("cpus", &Place::cpus);
  m.def(
      "physical_cores",
      [](const std::vector<int>& cpus, const std::string& root) { return physical_cores(cpus, root); }, "cpus"_a,
      "root"_a = "/", "Return the physical cores that the CPUs belong to.");
  m.def("place_threads", &place_threads, "threads"_a, "pin"_a, "cores"_a,
        "Return a place on the cores for each thread.");
  nb::class_<ThreadPool>(m, "ThreadPool", "Threads that run one function together; the caller is thread 0.")
      .def(nb::init<int, bool>(), "threads"_a, "pin"_a = false)
      .def(nb::init<std::vector<Place>>(), "places"_a)
      .def_prop_ro("size", &ThreadPool::size)
      .def_prop_ro("pinned", &ThreadPool::pinned, "True if every thread has a CPU of its own.")
      .def_prop_ro("nodes", &ThreadPool::nodes, "Number of NUMA nodes.")
      .def("run", &run_callable, "function"_a, "Call function(thread) on every thread; raise the first exception.")
      .def(
          "touch",
          [](ThreadPool& pool, const Bytes& memory) {
            const nb::gil_scoped_release release;
            touch_by_node(pool, reinterpret_cast<std::byte*>(memory.data()), memory.size(), touch_pages);
          },
          "memory"_a, "Touch every page of the memory, each on the NUMA node whose share it belongs to.")
      .def("launch_time", &launch_time, "launches"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Return the mean seconds of an empty launch.");
}

}  // namespace quire
