#include "sampling/pooling.h"

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

}  // namespace

Pooling::Pooling(const PoolingConfig& config, std::int64_t num_tokens)
    : config_(config), first_(config.type == "mean" ? 0 : num_tokens - 1), next_(first_) {
  if ((config.type != "mean" && config.type != "last") || config.dimensions < 0)
    throw std::invalid_argument("pooling '" + config.type + "' with " + std::to_string(config.dimensions) +
                                " dimensions is not available; it is mean or last, with 0 dimensions for all, or more");
}

void Pooling::add(std::span<const float> hidden_state) {
  const FlushDenormals flush;
  sums_.resize(hidden_state.size());
  for (std::size_t i = 0; i < hidden_state.size(); i++) sums_[i] += static_cast<double>(hidden_state[i]);
  next_++;
}

std::vector<float> Pooling::vector() const {
  const FlushDenormals flush;
  const auto size = config_.dimensions ? static_cast<std::size_t>(config_.dimensions) : sums_.size();
  if (size > sums_.size())
    throw std::invalid_argument(std::to_string(size) + " dimensions requested of a vector of " +
                                std::to_string(sums_.size()));
  std::vector<float> vector(size);
  for (std::size_t i = 0; i < size; i++) {
    vector[i] = static_cast<float>(sums_[i] / static_cast<double>(next_ - first_));
    if (!std::isfinite(vector[i]))
      throw std::runtime_error(
          "the model's hidden state holds a NaN or an infinity, so the prompt has no embedding; "
          "the checkpoint may be damaged");
  }
  if (config_.normalize) normalize(vector);
  return vector;
}

}  // namespace quire
