#include "sampling/pooling_head.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <utility>

namespace quire {
namespace {

constexpr std::size_t kLanes = 8;

/// e^x to within a few ulp; x counts as at most 700 from 0. libm's differs between CPUs in the last bit.
double exponential(double x) {
  constexpr double kRound = 0x1.8p52;  // adding and subtracting it rounds to an integer
  constexpr std::array kFactorials = {6227020800.0, 479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0,
                                      5040.0,       720.0,       120.0,      24.0,      6.0,      2.0};
  if (std::isnan(x)) return x;
  x = std::clamp(x, -700.0, 700.0);
  const double n = (x * 0x1.71547652b82fep+0 + kRound) - kRound;
  const double r = (x - n * 0x1.62e42fee00000p-1) - n * 0x1.a39ef35793c76p-33;  // ln 2 in two parts
  double p = 0;
  for (const double factorial : kFactorials) p = p * r + 1.0 / factorial;
  p = p * (r * r) + r + 1.0;
  return p * std::bit_cast<double>(static_cast<std::uint64_t>(1023 + static_cast<std::int64_t>(n)) << 52);
}

double sigmoid(double x) { return 1.0 / (1.0 + exponential(-x)); }

double tanh_of(double x) {
  const double t = exponential(-2.0 * std::abs(x));
  return std::copysign((1.0 - t) / (1.0 + t), x);
}

/// Abramowitz and Stegun 7.1.26, to within 1.5e-7.
double erf_of(double x) {
  const double y = std::abs(x), t = 1.0 / (1.0 + 0.3275911 * y);
  double p = 1.061405429;
  for (const double c : {-1.453152027, 1.421413741, -0.284496736, 0.254829592}) p = p * t + c;
  return std::copysign(1.0 - p * t * exponential(-y * y), x);
}

double relu(double x) { return x < 0 ? 0 : x; }
double silu(double x) { return x * sigmoid(x); }
double gelu(double x) { return 0.5 * x * (1.0 + erf_of(x * 0x1.6a09e667f3bcdp-1)); }
double gelu_tanh(double x) { return x * sigmoid(0x1.988453ccc8e01p+0 * (x + 0.044715 * x * x * x)); }
double identity(double x) { return x; }

using Function = double (*)(double);
constexpr std::array<std::pair<const char*, Function>, 8> kFunctions = {{{"", identity},
                                                                         {"identity", identity},
                                                                         {"sigmoid", sigmoid},
                                                                         {"tanh", tanh_of},
                                                                         {"relu", relu},
                                                                         {"silu", silu},
                                                                         {"gelu", gelu},
                                                                         {"gelu_tanh", gelu_tanh}}};

Function function_of(const std::string& name) {
  for (const auto& [known, function] : kFunctions)
    if (name == known) return function;
  throw std::invalid_argument("activation '" + name +
                              "' is none of identity, sigmoid, softmax, tanh, relu, silu, gelu and gelu_tanh");
}

void softmax(std::span<double> values) {
  const double largest = *std::ranges::max_element(values);
  double total = 0;
  for (double& value : values) total += value = exponential(value - largest);
  for (double& value : values) value /= total;
}

double dot(const float* weight, const double* x, std::size_t size) {
  std::array<double, kLanes> sums{};
  std::size_t i = 0;
  for (; i + kLanes <= size; i += kLanes)
    for (std::size_t lane = 0; lane < kLanes; lane++) sums[lane] += static_cast<double>(weight[i + lane]) * x[i + lane];
  for (; i < size; i++) sums[i % kLanes] += static_cast<double>(weight[i]) * x[i];
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

/// x becomes (x - mean) / deviation.
void standardize(std::vector<double>& x, double epsilon) {
  double sum = 0, squares = 0;
  for (const double value : x) sum += value;
  const double mean = sum / static_cast<double>(x.size());
  for (double& value : x) value -= mean;
  for (const double value : x) squares += value * value;
  const double deviation = std::sqrt(squares / static_cast<double>(x.size()) + epsilon);
  for (double& value : x) value /= deviation;
}

}  // namespace

void activate(const std::string& name, std::span<double> values) {
  if (values.empty()) return;
  if (name == "softmax") return softmax(values);
  const Function function = function_of(name);
  for (double& value : values) value = function(value);
}

void PoolingHead::add_linear(std::vector<float> weight, std::vector<float> bias, std::size_t inputs,
                             std::string activation) {
  if (activation != "softmax") function_of(activation);
  const std::size_t outputs = inputs ? weight.size() / inputs : 0;
  add({std::move(weight), std::move(bias), inputs, outputs, std::move(activation), false, 0});
}

void PoolingHead::add_norm(std::vector<float> weight, std::vector<float> bias, double epsilon) {
  const std::size_t size = weight.size();
  add({std::move(weight), std::move(bias), size, size, "", true, epsilon});
}

void PoolingHead::add(Layer layer) {
  const std::size_t size = layer.is_norm ? layer.outputs : layer.outputs * layer.inputs;
  const bool fits = layers_.empty() || layers_.back().outputs == layer.inputs;
  if (layer.outputs == 0 || layer.weight.size() != size || !fits ||
      (!layer.bias.empty() && layer.bias.size() != layer.outputs))
    throw std::invalid_argument("a layer of a pooling head has " + std::to_string(layer.weight.size()) +
                                " weights and " + std::to_string(layer.bias.size()) + " biases for " +
                                std::to_string(layer.inputs) +
                                " inputs; they must fit each other and the outputs of the layer before");
  layers_.push_back(std::move(layer));
}

std::vector<double> PoolingHead::apply(std::vector<double> x) const {
  for (const Layer& layer : layers_) {
    if (x.size() != layer.inputs)
      throw std::invalid_argument("a pooling head of " + std::to_string(layer.inputs) + " inputs got " +
                                  std::to_string(x.size()) + " values");
    std::vector<double> y(layer.outputs);
    if (layer.is_norm) {
      standardize(x, layer.epsilon);
      for (std::size_t i = 0; i < y.size(); i++) y[i] = x[i] * static_cast<double>(layer.weight[i]);
    } else {
      for (std::size_t i = 0; i < y.size(); i++) y[i] = dot(&layer.weight[i * layer.inputs], x.data(), x.size());
    }
    for (std::size_t i = 0; i < layer.bias.size(); i++) y[i] += static_cast<double>(layer.bias[i]);
    activate(layer.activation, y);
    x = std::move(y);
  }
  return x;
}

}  // namespace quire
