#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace quire {

/// How the hidden states of a prompt become one vector.
struct PoolingConfig {
  std::string type = "last";    ///< "last": the last position's state alone; "mean": of all positions
  bool normalize = true;        ///< to length 1
  std::int32_t dimensions = 0;  ///< how many values to keep, the first of them; 0: all
};

/// The vector of one prompt, while its hidden states come. They are added in f64 in order of positions, each once,
/// whatever is computed again; so the bits don't depend on the chunks that the prompt is computed in.
class Pooling {
 public:
  /// Throws std::invalid_argument for another type, or fewer than 0 dimensions.
  Pooling(const PoolingConfig& config, std::int64_t num_tokens);

  /// The position whose state is to be added next. All from it to the prompt's end have to be computed.
  std::int64_t next() const { return next_; }

  void add(std::span<const float> state);

  /// The vector, when all states are added: cut, then normalised; a zero vector stays as it is. Throws
  /// std::invalid_argument for more dimensions than there are, std::runtime_error if a value is NaN or infinite.
  std::vector<float> vector() const;

 private:
  PoolingConfig config_;
  std::int64_t first_, next_;
  std::vector<double> sums_;  ///< empty until the first state comes: a prompt that waits costs nothing
};

}  // namespace quire
