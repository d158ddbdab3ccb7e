#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace quire {

/// Pooling of the hidden states of a prompt into one vector.
struct PoolingConfig {
  std::string type = "last";    ///< "last": the last hidden state alone; "mean": of all positions
  bool normalize = true;        ///< to length 1
  std::int32_t dimensions = 0;  ///< how many values to keep, the first of them; 0: all
};

/// Pools the hidden states of one prompt into a vector. They are added in f64 in order of positions, each once even if
/// it is computed again, so the bits do not depend on the chunks of the prompt.
class Pooling {
 public:
  /// Throws std::invalid_argument for another type, or fewer than 0 dimensions.
  Pooling(const PoolingConfig& config, std::int64_t num_tokens);

  /// The position whose hidden state is to be added next. All positions from here on have to be computed.
  std::int64_t next() const { return next_; }

  void add(std::span<const float> hidden_state);

  /// The vector, once all hidden states are added: cut, then normalized; a zero vector stays as it is. Throws
  /// std::invalid_argument for more dimensions than there are, std::runtime_error if a value is NaN or infinite.
  std::vector<float> vector() const;

 private:
  PoolingConfig config_;
  std::int64_t first_, next_;
  std::vector<double> sums_;  ///< empty before the first hidden state, so a waiting prompt costs nothing
};

}  // namespace quire
