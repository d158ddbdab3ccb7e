#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bind_struct.h"
#include "bindings/bindings.h"
#include "compute/runner.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::vector<float> copy_of(const Floats& values) { return {values.data(), values.data() + values.size()}; }

Sizes split_attention(Runner& runner, Sizes sizes) {
  Dims dims = dims_of(sizes);
  runner.split_attention(dims);
  for (const char* name : {"entries", "kv_splits", "reductions"})
    sizes[name] = dims[static_cast<std::size_t>(dim_of(name))];
  return sizes;
}

/// Token ids and log probabilities, the given token first and then the likeliest ones, and the token's rank.
using Logprobs = std::tuple<std::vector<std::int32_t>, std::vector<float>, std::int32_t>;

Logprobs logprobs_tuple(std::int32_t token, const TokenLogprobs& entry) {
  std::vector<std::int32_t> ids{token};
  std::vector<float> values{entry.logprob};
  ids.insert(ids.end(), entry.top_ids.begin(), entry.top_ids.end());
  values.insert(values.end(), entry.top_logprobs.begin(), entry.top_logprobs.end());
  return {std::move(ids), std::move(values), entry.rank};
}

/// An entry for each token of a span; nothing if the sequence did not ask for log probabilities.
std::optional<std::vector<Logprobs>> logprobs_of_row(const StepResult& result, std::size_t row) {
  const std::vector<TokenLogprobs>& entries = result.logprobs.at(row);
  if (entries.empty()) return std::nullopt;
  std::vector<Logprobs> span;
  for (std::size_t i = 0; i < entries.size(); i++) span.push_back(logprobs_tuple(result.token_ids[row][i], entries[i]));
  return span;
}

std::map<std::int32_t, nb::bytes> pooled_vectors(const StepResult& result) {
  std::map<std::int32_t, nb::bytes> vectors;
  for (const auto& [index, vector] : result.pooled)
    vectors.emplace(index, nb::bytes(vector.data(), vector.size() * sizeof(float)));
  return vectors;
}

std::map<std::int32_t, std::vector<Logprobs>> prompt_logprobs(const StepResult& result) {
  std::map<std::int32_t, std::vector<Logprobs>> logprobs;
  for (const auto& [index, positions] : result.prompt_logprobs)
    for (const Position& position : positions)
      logprobs[index].push_back(logprobs_tuple(position.token, position.logprobs));
  return logprobs;
}

std::map<std::string, Address> input_addresses(const Runner& runner) {
  std::map<std::string, Address> addresses;
  runner.inputs().for_each(
      [&](const char* name, const auto* array) { addresses[name] = reinterpret_cast<Address>(array); });
  return addresses;
}

void bind_inputs(nb::class_<Runner>& runner) {
  runner
      .def(
          "kv_layer", [](Runner& r, std::int64_t layer) { return reinterpret_cast<Address>(r.kv().layer(layer)); },
          "layer"_a, "Return the address of a layer's KV tiles.")
      .def_prop_ro(
          "states", [](const Runner& r) { return reinterpret_cast<Address>(r.states()); },
          "Address of the first record of state; 0 for a model without state, and before `open_kv`.")
      .def("split_attention", &split_attention, "dims"_a,
           "Move attention entries of the step inputs to KV splits, as a step does; return the resulting dims.")
      .def_prop_ro("inputs", &input_addresses, "Addresses of the step inputs, by name.");
}

}  // namespace

void bind_runner(nb::module_& m) {
  nb::class_<PoolingHead>(m, "PoolingHead", "The layers between a pooled hidden state and its embedding or labels.")
      .def(nb::init<>())
      .def(
          "add_linear",
          [](PoolingHead& head, Floats weight, Floats bias, std::size_t inputs, std::string activation) {
            head.add_linear(copy_of(weight), copy_of(bias), inputs, std::move(activation));
          },
          "weight"_a, "bias"_a, "inputs"_a, "activation"_a,
          "Append activation(weight x + bias); the weight is [outputs, inputs], flat.")
      .def(
          "add_norm",
          [](PoolingHead& head, Floats weight, Floats bias, double epsilon) {
            head.add_norm(copy_of(weight), copy_of(bias), epsilon);
          },
          "weight"_a, "bias"_a, "epsilon"_a, "Append a LayerNorm.");
  nb::class_<StepResult>(m, "StepResult", "The outcome of a step, by index in the batch.")
      .def_ro("token_ids", &StepResult::token_ids,
              "The span of each sequence: the tokens that the step appended to it, forced ones included.")
      .def_ro("pending", &StepResult::pending, "Rows whose samples are deferred: `Runner.collect` adds them.")
      .def("logprobs", &logprobs_of_row, "row"_a,
           "Return an entry for each token of a span; None if the sequence did not ask for log probabilities.")
      .def_prop_ro("prompt_logprobs", &prompt_logprobs)
      .def_ro("first_rows", &StepResult::first_rows,
              "The first row of each sequence among the step's tokens, or of the branch that has taken its place.")
      .def_ro("lookahead_rows", &StepResult::lookahead_rows,
              "The rows of lookahead tokens among the step's tokens, by sequence.")
      .def_prop_ro("pooled", &pooled_vectors, "Vectors of f32, as the bytes that they have in memory.")
      .def_ro("errors", &StepResult::errors);
  bind_struct(m, "KvLayerShape", "The KV of a layer in one tile of tokens.", field("heads", &KvLayerShape::heads),
              field("tile_bytes", &KvLayerShape::tile_bytes, "Bytes of K and V of one head."),
              field("value_offset", &KvLayerShape::value_offset, "Offset of V in a tile of a head, in bytes."));
  bind_struct(
      m, "RunnerConfig", "Sizes of a model, its KV cache and its steps.", field("num_pages", &RunnerConfig::num_pages),
      field("block_size", &RunnerConfig::block_size), field("vocab_size", &RunnerConfig::vocab_size),
      field("max_num_batched_tokens", &RunnerConfig::max_num_batched_tokens),
      field("max_logit_rows", &RunnerConfig::max_logit_rows), field("logit_stride", &RunnerConfig::logit_stride),
      field("hidden_size", &RunnerConfig::hidden_size), field("tokens_per_entry", &RunnerConfig::tokens_per_entry),
      field("kv_layers", &RunnerConfig::kv_layers), option("state", &RunnerConfig::state),
      option("window", &RunnerConfig::window), option("bidirectional", &RunnerConfig::bidirectional),
      option("samples_on_device", &RunnerConfig::samples_on_device), option("lookahead", &RunnerConfig::lookahead),
      option("kv_memory_fd", &RunnerConfig::kv_memory_fd), option("kv_model", &RunnerConfig::kv_model),
      option("sealed_queues", &RunnerConfig::sealed_queues));
  nb::class_<Runner> runner(m, "Runner",
                            "Executes the steps of a model on a device; owns its KV pages, sequences and plans.");
  runner.def(nb::init<const RunnerConfig&, Device&>(), "config"_a, "device"_a, nb::keep_alive<1, 3>())
      .def("open_kv", &Runner::open_kv, nb::call_guard<nb::gil_scoped_release>(),
           "Map KV memory; to be called once, before whatever needs it. Until then another process may have its file.")
      .def_prop_ro("body", &Runner::body, nb::rv_policy::reference_internal, "Plan from token ids to hidden states.")
      .def_prop_ro("head", &Runner::head, nb::rv_policy::reference_internal, "Plan from hidden states to logits.")
      .def_prop_ro("encoding", &Runner::encoding, nb::rv_policy::reference_internal,
                   "Plan of a draft head from features to the hidden states that its steps begin with.")
      .def("encode", &Runner::encode, "num_tokens"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Encode the features of the next step's first rows.")
      .def_prop_ro("hidden_states", &Runner::hidden_states, nb::rv_policy::reference_internal,
                   "Plan from hidden states to those that are pooled.")
      .def_prop_ro("resampling", &Runner::resampling, nb::rv_policy::reference_internal,
                   "Plan that samples one row of logits once more, for a device that samples.")
      .def("set_pooling_head", &Runner::set_pooling_head, "adapter"_a, "head"_a.none(),
           "Let the pooled vectors of an adapter's sequences go through this head, or through the model's, which is "
           "that "
           "of adapter 0; between steps.")
      .def_prop_ro(
          "num_prefaulted_pages", [](Runner& r) { return r.kv().num_prefaulted(); },
          "Number of KV pages that are as large as the memory that is resident ahead of use.")
      .def(
          "step",
          [](Runner& r, const std::vector<std::int32_t>& slots, const std::vector<std::int64_t>& starts,
             const std::vector<std::int64_t>& counts, const std::optional<std::vector<std::int64_t>>& num_drafts,
             const std::vector<std::pair<std::int32_t, std::vector<std::int32_t>>>& branches) {
            std::vector<DraftBranch> paths;
            for (const auto& [index, tokens] : branches) paths.push_back({index, tokens});
            return r.step(
                {slots, starts, counts, num_drafts ? std::span(*num_drafts) : std::span<const std::int64_t>(), paths});
          },
          "slots"_a, "starts"_a, "counts"_a, "num_drafts"_a.none() = nb::none(),
          "branches"_a = std::vector<std::pair<std::int32_t, std::vector<std::int32_t>>>(),
          nb::call_guard<nb::gil_scoped_release>(),
          "Compute tokens [start, start + count) of each slot, and sample where a chunk reaches the sequence's end. "
          "The last num_drafts tokens of a sequence are drafts, which are kept as far as they are what is sampled. "
          "`branches`, (index in the batch, tokens), may be kept instead, where that makes for more tokens; one "
          "without tokens is the lookahead token.")
      .def("collect", &Runner::collect, "result"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Add pending spans to the result of the last step, waiting for one at least, and return them by row; none "
           "when none is pending.")
      .def("set_synthetic_acceptance", &Runner::set_synthetic_acceptance, "probability"_a,
           "Take each draft for right with this probability, whatever is sampled: for benchmarks.")
      .def("set_keeps_features", &Runner::set_keeps_features, "keeps"_a,
           "Set whether the next steps keep hidden states for a draft head.")
      .def(
          "fork",
          [](Runner& r, std::int32_t slot, std::int32_t source, std::int64_t num_computed, std::int64_t num_tokens) {
            return r.kv_cache().fork(slot, source, num_computed, num_tokens);
          },
          "slot"_a, "source"_a, "num_computed"_a, "num_tokens"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Give a slot without pages the first computed positions of another; return False if there are too few "
          "pages.");
  bind_inputs(runner);
  bind_kv_pages(m, runner);
}

}  // namespace quire
