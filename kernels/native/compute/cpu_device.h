#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "compute/arena.h"
#include "compute/device.h"
#include "compute/file_mapping.h"

namespace quire {

/// The CPUs of this host: kernels are functions of this process, run by the threads.
///
/// Each launch is run by all threads. Idle ones take its items in chunks, from their own NUMA node's share first; the
/// next launch begins when all items are done. So a thread that is descheduled, or that has the most expensive items,
/// delays the others by one chunk at most.
class CpuDevice final : public Device {
 public:
  explicit CpuDevice(ThreadPool& threads);

  std::byte* allocate(std::size_t bytes) override { return static_cast<std::byte*>(arena_.allocate(bytes)); }

  /// Where threads run on several nodes, those of each touch first the part that `run` prefers to give them, so it lies
  /// on their node.
  std::byte* allocate_matrix(std::size_t bytes) override;

  /// On huge pages. A part may share one with a neighbour's part.
  void place_matrix(std::byte* memory, std::size_t bytes) const override;

  bool in_host_memory() const override { return true; }

  /// What another process has written is resident at once.
  std::byte* map_file(int fd, std::size_t bytes, bool writable) override;

  /// Also moves to huge pages what was not placed on them.
  void make_read_only(std::byte* memory) override;
  void check(const void* address, std::size_t bytes) const override;

  void read(Runs runs, const UseRuns& use) const override { use(0, runs); }
  void write(Runs runs, const UseRuns& fill) const override { fill(0, runs); }

  /// Heads are distributed over the NUMA nodes in turn.
  void touch(std::byte* begin, std::byte* end, std::int64_t head) const override;
  void copy(std::byte* to, const std::byte* from, const Pieces& pieces) const override;
  void clear(std::byte* memory, const Pieces& pieces) const override;

  void begin_step() override {}

  /// Returns the address of the numbers.
  PageList page_list(std::span<const std::int32_t> pages) override { return reinterpret_cast<PageList>(pages.data()); }
  std::int64_t busy_items() const override;
  void run(const Plan& plan, const Dims& dims) override;
  std::vector<double> profile(const Plan& plan, const Dims& dims) override;

 private:
  template <class OnDone>
  void work(std::span<const Launch> launches, int thread, const Dims& dims, OnDone on_done);
  std::int64_t compute(std::span<const Launch> launches, std::size_t launch, int thread, std::int64_t items,
                       const Dims& dims);
  void reset(std::size_t num_launches);

  Arena arena_;
  std::list<FileMapping> files_;
  std::vector<const Place*> places_;              ///< place of a thread on each node, if there are several nodes
  std::vector<std::atomic<std::int64_t>> taken_;  ///< items taken from each node's share of a launch
  std::vector<std::atomic<std::int64_t>> done_;   ///< finished items of each launch
  Waitable finished_;                             ///< number of finished launches
};

}  // namespace quire
