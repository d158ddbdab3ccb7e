#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/filesystem.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "compute/first_touch.h"
#include "compute/thread_pool.h"
#include "compute/topology.h"
#include "sampling/philox.h"
#include "sampling/sampler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<std::int32_t>;

nb::dict dict_of(std::int32_t token, const std::optional<TokenLogprobs>& logprobs) {
  nb::dict result;
  result["token"] = token;
  result["logprob"] = logprobs ? nb::cast(logprobs->logprob) : nb::none();
  result["rank"] = logprobs ? nb::cast(logprobs->rank) : nb::none();
  result["top_ids"] = logprobs ? nb::cast(logprobs->top_ids) : nb::none();
  result["top_logprobs"] = logprobs ? nb::cast(logprobs->top_logprobs) : nb::none();
  return result;
}

nb::dict sample_row(const Logits& logits, const Tokens& tokens, std::int64_t num_prompt_tokens, std::int64_t position,
                    const SamplingConfig& config, TokenConstraint* constraint) {
  const SamplingState state(config, tokens, num_prompt_tokens, static_cast<std::int32_t>(logits.size()));
  std::vector<float> row(logits.data(), logits.data() + logits.size());
  SamplerScratch scratch;
  const SampleResult result = sample(row, state, tokens, position, scratch, constraint);
  return dict_of(result.token, result.logprobs);
}

nb::dict token_logprobs(const Logits& logits, std::int32_t token, std::int32_t top_n) {
  SamplerScratch scratch;
  return dict_of(token, logprobs_of({logits.data(), logits.size()}, token, top_n, scratch));
}

double launch_time(ThreadPool& pool, int launches) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < launches; ++i) pool.run([](int) {});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / launches;
}

void run_callable(ThreadPool& pool, const nb::callable& function) {
  const nb::gil_scoped_release release;
  pool.run([&](int thread) {
    const nb::gil_scoped_acquire acquire;
    function(thread);
  });
}

void touch(ThreadPool& pool, std::uintptr_t address, std::size_t bytes) {
  touch_by_node(pool, reinterpret_cast<std::byte*>(address), bytes);
}

}  // namespace

void bind_support(nb::module_& m) {
  m.def("default_threads", &default_threads, "root"_a = "/",
        "QUIRE_THREADS, or else the cores that affinity mask and cgroup quota (found under `root`) grant.");
  m.def("affinity_cpus", &affinity_cpus, "CPUs that this process may run on.");
  nb::class_<Place>(m, "Place", "CPUs of one NUMA node: those of a core, or those that a thread is bound to.")
      .def(nb::init<int, std::vector<int>>(), "node"_a, "cpus"_a)
      .def_ro("node", &Place::node)
      .def_ro("cpus", &Place::cpus);
  m.def("physical_cores", &physical_cores, "cpus"_a, "root"_a = "/", "The cores that these CPUs belong to.");
  m.def("place_threads", &place_threads, "threads"_a, "pin"_a, "cores"_a, "Places of threads on these cores.");
  nb::class_<ThreadPool>(m, "ThreadPool", "Threads that run one function together; the caller is thread 0.")
      .def(nb::init<int, bool>(), "threads"_a, "pin"_a = false)
      .def(nb::init<std::vector<Place>>(), "places"_a)
      .def_prop_ro("size", &ThreadPool::size)
      .def_prop_ro("pinned", &ThreadPool::pinned)
      .def_prop_ro("nodes", &ThreadPool::nodes)
      .def("run", &run_callable, "function"_a, "Calls function(thread) on every thread; the first exception is raised.")
      .def("touch", &touch, "address"_a, "num_bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Touches every page, each on the node in whose share it is.")
      .def("launch_time", &launch_time, "launches"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Mean seconds of a launch that does nothing.");
  m.def("philox_block", &philox_block, "counter"_a, "key"_a, "Philox4x32-10.");
  m.def("philox", &uniform, "seed"_a, "position"_a, "draw"_a = 0, "The number in [0, 1) drawn at a position.");
  m.def("sample", &sample_row, "logits"_a, "tokens"_a, "num_prompt_tokens"_a, "position"_a, "config"_a,
        "constraint"_a.none() = nb::none(), "Samples one token with a fresh state, for tests.");
  m.def("token_logprobs", &token_logprobs, "logits"_a, "token"_a, "top_n"_a,
        "Log probability and rank of a token, and the likeliest tokens.");
}

}  // namespace quire
