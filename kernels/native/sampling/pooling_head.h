#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace quire {

/// The layers between a pooled hidden state and its embedding or the logits of its labels, in order. They are computed
/// in f64, sums over inputs in 8 lanes that are added in order, with exp of our own: the same bits everywhere.
class PoolingHead {
 public:
  /// Appends activation(weight x + bias); `weight` is [outputs, inputs], and `bias` may be empty. Throws
  /// std::invalid_argument for sizes that do not fit each other or the layer before, or an unknown activation.
  void add_linear(std::vector<float> weight, std::vector<float> bias, std::size_t inputs, std::string activation);

  /// Appends a LayerNorm; `bias` may be empty. Throws std::invalid_argument for sizes that do not fit.
  void add_norm(std::vector<float> weight, std::vector<float> bias, double epsilon);

  bool empty() const { return layers_.empty(); }

  /// Throws std::invalid_argument for a vector of another size than the first layer's inputs.
  std::vector<double> apply(std::vector<double> vector) const;

 private:
  struct Layer {
    std::vector<float> weight, bias;
    std::size_t inputs, outputs;
    std::string activation;
    bool is_norm;
    double epsilon;
  };

  void add(Layer layer);

  std::vector<Layer> layers_;
};

/// Applies an activation to all values: "" or "identity" for none, "sigmoid", "softmax", "tanh", "relu", "silu", "gelu"
/// or "gelu_tanh". Throws std::invalid_argument for any other.
void activate(const std::string& name, std::span<double> values);

}  // namespace quire
