#include "compute/cuda_steps.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

constexpr std::size_t kMostSteps = 128;
constexpr int kOfThisThread = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
constexpr std::size_t kChunk = std::size_t{1} << 16;

/// Rounds up to three significant bits: few sizes, none of them a quarter too large.
std::int64_t rounded(std::int64_t size) {
  const auto bits = std::bit_width(static_cast<std::uint64_t>(size));
  const std::int64_t unit = bits <= 3 ? 1 : std::int64_t{1} << (bits - 3);
  return (size + unit - 1) / unit * unit;
}

}  // namespace

CudaSteps::~CudaSteps() {
  for (auto& [key, step] : steps_) drop(step);
}

void CudaSteps::drop(CudaStep& step) const {
  if (step.graph != nullptr) driver_.graph_exec_destroy(step.graph);
  step.graph = nullptr;
}

CudaStep& CudaSteps::get(const Plan& plan, const Dims& dims) {
  Dims most{};
  std::ranges::transform(dims, most.begin(), rounded);
  CudaStep& step = find(plan, most);
  if (step.dims != dims) write_sizes(step, plan, dims);
  return step;
}

CudaStep& CudaSteps::find(const Plan& plan, const Dims& most) {
  const Key key{plan.version(), most};
  if (const auto found = places_.find(key); found != places_.end()) {
    steps_.splice(steps_.begin(), steps_, found->second);
    CudaStep& step = steps_.front().second;
    step.is_repeated = true;
    return step;
  }
  CudaStep step{.most = most, .dims = {}};
  if (steps_.size() == kMostSteps) {
    places_.erase(steps_.back().first);
    step.memory = steps_.back().second.memory;
    drop(steps_.back().second);
    steps_.pop_back();
  }
  write(step, plan);
  steps_.emplace_front(key, std::move(step));
  places_[key] = steps_.begin();
  return steps_.front().second;
}

/// Writes the operands to the memory of the step, which may have been another's, and the addresses of all.
void CudaSteps::write(CudaStep& step, const Plan& plan) {
  const std::size_t num_launches = plan.launches().size();
  std::vector<std::byte>& content = step.content;
  content.resize(in_lines(sizeof step.dims) + in_lines(num_launches * sizeof(std::int64_t)));
  std::vector<std::size_t> places;
  for (const Launch& launch : plan.launches()) {
    places.push_back(content.size());
    const std::size_t bytes = launch.buffers.size() * sizeof(void*);
    content.resize(content.size() + in_lines(bytes));
    std::memcpy(content.data() + places.back(), launch.buffers.data(), bytes);
  }
  if (step.memory.size() < content.size()) {
    const std::size_t bytes = (content.size() + kChunk - 1) / kChunk * kChunk;
    step.memory = {memory_.allocate(bytes), bytes};
  }
  memory_.write(step.memory.data(), content.data(), content.size());
  step.dims_address = reinterpret_cast<CudaDriver::Pointer>(step.memory.data());
  for (std::size_t i = 0; i < num_launches; i++) {
    const CudaDriver::Pointer items = step.dims_address + in_lines(sizeof step.dims) + i * sizeof(std::int64_t);
    step.parts.push_back({step.dims_address + places[i], items, plan.launches()[i].items(step.most)});
  }
}

/// Writes the dims and the items of the step that comes next.
void CudaSteps::write_sizes(CudaStep& step, const Plan& plan, const Dims& dims) {
  std::vector<std::int64_t> sizes(in_lines(sizeof dims) / sizeof(std::int64_t));
  std::ranges::copy(dims, sizes.begin());
  for (const Launch& launch : plan.launches()) sizes.push_back(launch.items(dims));
  const std::span<const std::byte> bytes = std::as_bytes(std::span(sizes));
  std::ranges::copy(bytes, step.content.begin());
  memory_.write(step.memory.data(), step.content.data(), bytes.size());
  step.dims = dims;
}

/// A single launch is as fast without a graph. It may come while another thread copies pages, which a graph that is
/// being made would take in.
void CudaSteps::launch(CudaStep& step, const std::function<void()>& launch) {
  if (step.graph == nullptr && step.is_repeated && makes_graphs_ && step.parts.size() > 1) capture(step, launch);
  if (step.graph == nullptr) {
    launch();
    return;
  }
  driver_.check(driver_.graph_launch(step.graph, stream_.handle()), "launch a graph");
  num_graph_launches_++;
}

/// Makes the graph of a step. Once the driver can't, no other is tried.
void CudaSteps::capture(CudaStep& step, const std::function<void()>& launch) {
  try {
    if (!driver_.has_graphs()) throw std::runtime_error("the driver is too old for them");
    CudaDriver::Handle graph = record(launch);
    const CudaDriver::Result result = driver_.graph_instantiate(&step.graph, graph, 0);
    if (result != 0) step.graph = nullptr;
    driver_.graph_destroy(graph);
    driver_.check(result, "make a graph");
  } catch (const DeviceLost&) {
    throw;
  } catch (const std::runtime_error& error) {
    makes_graphs_ = false;
    if (warn_) warn_(std::string("steps are no graphs from now on, and take longer: ") + error.what());
  }
}

/// Returns a graph of what `launch` launches.
CudaDriver::Handle CudaSteps::record(const std::function<void()>& launch) const {
  CudaDriver::Handle graph = nullptr;
  driver_.check(driver_.capture_begin(stream_.handle(), kOfThisThread), "begin a graph");
  try {
    launch();
  } catch (...) {
    if (driver_.capture_end(stream_.handle(), &graph) == 0 && graph != nullptr) driver_.graph_destroy(graph);
    throw;
  }
  driver_.check(driver_.capture_end(stream_.handle(), &graph), "end a graph");
  if (graph == nullptr) throw std::runtime_error("the GPU has made no graph");
  return graph;
}

}  // namespace quire
