#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "sampling/pooling_head.h"

namespace quire {

/// Pooling of the hidden states of a prompt into one vector.
struct PoolingConfig {
  std::string type = "last";    ///< "last" or "cls": the last or the first hidden state alone; "mean", "max": of all
  bool normalize = true;        ///< scale the vector to length 1
  std::int32_t dimensions = 0;  ///< number of first values to keep; 0: all
  std::int64_t skipped = 0;     ///< tokens at the beginning that a mean or a maximum leaves out
  bool head = false;            ///< apply the model's pooling head
  std::string activation;       ///< activation of the final values, see `activate`
};

/// Pools the hidden states of one prompt into a vector. They are added in f64 in order of positions, each once even if
/// it is computed again, so the bits do not depend on the chunks of the prompt.
class Pooling {
 public:
  /// Throws std::invalid_argument for another type, fewer than 0 dimensions, or if no token is left to pool.
  Pooling(const PoolingConfig& config, std::int64_t num_tokens);

  /// The position whose hidden state is to be added next. All positions from here on have to be computed.
  std::int64_t next() const { return next_; }

  /// The position after the last one whose hidden state is needed.
  std::int64_t end() const { return end_; }

  void add(std::span<const float> hidden_state);

  /// The vector, once all hidden states are added: through the head, cut, then normalized; a zero vector stays as it
  /// is. Throws std::invalid_argument for more dimensions than there are, std::runtime_error if a value is NaN or
  /// infinite.
  std::vector<float> vector(const PoolingHead& head) const;

 private:
  PoolingConfig config_;
  std::int64_t first_, next_, end_;
  std::vector<double> sums_;  ///< accumulated hidden states; empty before the first, so a waiting prompt costs nothing
};

}  // namespace quire
