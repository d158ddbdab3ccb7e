#include "compute/device.h"

#include <algorithm>
#include <cstring>

namespace quire {
namespace {

constexpr std::size_t kRun = std::size_t{4} << 20;  // bytes that are copied at once

}  // namespace

std::vector<std::span<std::byte>> split(std::span<std::byte> memory, std::size_t most) {
  std::vector<std::span<std::byte>> runs;
  for (; !memory.empty(); memory = memory.subspan(runs.back().size()))
    runs.push_back(memory.first(std::min(memory.size(), most)));
  return runs;
}

std::byte* MatrixBuffer::begin(std::span<std::byte> matrix) {
  device_.check(matrix.data(), matrix.size());
  return memory_for(matrix);
}

void Device::write(std::byte* to, std::span<const std::byte> from) const {
  write(split({to, from.size()}, kRun), [&](std::size_t first, Runs host) {
    const std::byte* source = from.data() + first * kRun;
    for (std::span<std::byte> run : host) {
      std::memcpy(run.data(), source, run.size());
      source += run.size();
    }
  });
}

void Device::read(std::span<std::byte> to, std::byte* from) const {
  read(split({from, to.size()}, kRun), [&](std::size_t first, Runs host) {
    std::byte* target = to.data() + first * kRun;
    for (std::span<std::byte> run : host) {
      std::memcpy(target, run.data(), run.size());
      target += run.size();
    }
  });
}

}  // namespace quire
