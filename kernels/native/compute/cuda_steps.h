#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "compute/cuda_driver.h"
#include "compute/cuda_memory.h"
#include "compute/plan.h"

namespace quire {

/// Tells the user something in a line.
using Warn = std::function<void(const std::string&)>;

/// A plan as a GPU has it for all steps of about the same dims: its operands in memory, with the dims and the work
/// items of the step that it runs next, and once it is used again a graph of its launches.
struct CudaStep {
  /// A launch with the addresses of its operands and of its number of items.
  struct Part {
    CudaDriver::Pointer buffers, items;
    std::int64_t most_items;  ///< of all such steps
  };

  Dims most;  ///< the largest dims
  Dims dims;  ///< those in memory
  CudaDriver::Pointer dims_address = 0;
  std::vector<Part> parts;
  std::span<std::byte> memory;         ///< dims, numbers of items, operands
  std::vector<std::byte> content;      ///< what was written there, which the driver may read until the step is done
  CudaDriver::Handle graph = nullptr;  ///< nullptr: there is none
  bool is_repeated = false;
};

/// The steps that a GPU has computed last. One of several launches whose like comes again is a graph, which is launched
/// as a whole.
///
/// Kernels read the dims and the number of their items from memory, and a grid may be larger than that. So steps share
/// a graph if their dims are equal once they are rounded up.
class CudaSteps {
 public:
  /// `warn` is called once if the driver fails to make a graph, with the reason.
  CudaSteps(const CudaDriver& driver, CudaMemory& memory, const CudaStream& stream, Warn warn)
      : driver_(driver), memory_(memory), stream_(stream), warn_(std::move(warn)) {}
  ~CudaSteps();
  CudaSteps(const CudaSteps&) = delete;
  CudaSteps& operator=(const CudaSteps&) = delete;

  /// Returns the step for these dims of a plan, good until the next call. The GPU must be idle.
  CudaStep& get(const Plan& plan, const Dims& dims);

  /// Launches a step: its graph, or else what `launch` launches, of which it makes a graph if the step is repeated.
  void launch(CudaStep& step, const std::function<void()>& launch);

  std::int64_t num_graph_launches() const { return num_graph_launches_; }

 private:
  using Key = std::pair<std::uint64_t, Dims>;
  using Steps = std::list<std::pair<Key, CudaStep>>;

  CudaStep& find(const Plan& plan, const Dims& most);
  void write(CudaStep& step, const Plan& plan);
  void write_sizes(CudaStep& step, const Plan& plan, const Dims& dims);
  void capture(CudaStep& step, const std::function<void()>& launch);
  CudaDriver::Handle record(const std::function<void()>& launch) const;
  void drop(CudaStep& step) const;

  const CudaDriver& driver_;
  CudaMemory& memory_;
  const CudaStream& stream_;
  Warn warn_;
  bool makes_graphs_ = true;  ///< false once the driver has failed to make one
  std::int64_t num_graph_launches_ = 0;
  Steps steps_;  ///< the last one first
  std::map<Key, Steps::iterator> places_;
};

}  // namespace quire
