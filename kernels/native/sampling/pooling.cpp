#include "sampling/pooling.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "compute/denormals.h"

namespace quire {
namespace {

void normalize(std::vector<float>& vector) {
  double squares = 0;
  for (const float value : vector) squares += static_cast<double>(value) * static_cast<double>(value);
  if (squares == 0) return;
  const double length = std::sqrt(squares);
  for (float& value : vector) value = static_cast<float>(static_cast<double>(value) / length);
}

bool pools_all(const PoolingConfig& config) { return config.type == "mean" || config.type == "max"; }

}  // namespace

Pooling::Pooling(const PoolingConfig& config, std::int64_t num_tokens)
    : config_(config),
      first_(pools_all(config)      ? config.skipped
             : config.type == "cls" ? 0
                                    : num_tokens - 1),
      next_(first_),
      end_(config.type == "cls" ? 1 : num_tokens) {
  if ((!pools_all(config) && config.type != "last" && config.type != "cls") || config.dimensions < 0)
    throw std::invalid_argument("pooling '" + config.type + "' with " + std::to_string(config.dimensions) +
                                " dimensions is not available; it is last, mean, cls or max, with 0 dimensions for "
                                "all, or more");
  if (config.skipped < 0 || config.skipped >= num_tokens)
    throw std::invalid_argument("pooling leaves out " + std::to_string(config.skipped) + " of " +
                                std::to_string(num_tokens) + " tokens; at least one must be left");
}

void Pooling::add(std::span<const float> hidden_state) {
  const FlushDenormals flush;
  const bool takes_largest = config_.type == "max";
  if (sums_.empty()) sums_.assign(hidden_state.size(), takes_largest ? -INFINITY : 0);
  for (std::size_t i = 0; i < hidden_state.size(); i++) {
    const auto value = static_cast<double>(hidden_state[i]);
    if (!takes_largest)
      sums_[i] += value;
    else if (!std::isnan(sums_[i]) && !(value <= sums_[i]))
      sums_[i] = value;
  }
  next_++;
}

std::vector<float> Pooling::vector(const PoolingHead& head) const {
  const FlushDenormals flush;
  const double count = config_.type == "max" ? 1 : static_cast<double>(next_ - first_);
  std::vector<double> pooled(sums_);
  for (double& value : pooled) value = static_cast<double>(static_cast<float>(value / count));
  if (config_.head) pooled = head.apply(std::move(pooled));
  activate(config_.activation, pooled);
  const auto size = config_.dimensions ? static_cast<std::size_t>(config_.dimensions) : pooled.size();
  if (size > pooled.size())
    throw std::invalid_argument(std::to_string(size) + " dimensions requested of a vector of " +
                                std::to_string(pooled.size()));
  std::vector<float> vector(size);
  for (std::size_t i = 0; i < size; i++) {
    vector[i] = static_cast<float>(pooled[i]);
    if (!std::isfinite(vector[i]))
      throw std::runtime_error(
          "the model's hidden state holds a NaN or an infinity, so the prompt has no embedding; "
          "the checkpoint may be damaged");
  }
  if (config_.normalize) normalize(vector);
  return vector;
}

}  // namespace quire
