#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "sampling/philox.h"
#include "sampling/sampler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<std::int32_t>;

template <class T>
bool read_field(const nb::dict& config, const char* name, T& field) {
  if (!config.contains(name)) return false;
  if (!nb::try_cast(config[name], field)) {
    throw std::invalid_argument(std::string(name) + "=" + nb::repr(config[name]).c_str() + " has the wrong type");
  }
  return true;
}

SamplingConfig config_of(const nb::dict& config) {
  SamplingConfig result;
  std::size_t known = 0;
  const auto read = [&](const char* name, auto& field) { known += read_field(config, name, field); };
  read("temperature", result.temperature);
  read("top_k", result.top_k);
  read("top_p", result.top_p);
  read("min_p", result.min_p);
  read("repetition_penalty", result.repetition_penalty);
  read("presence_penalty", result.presence_penalty);
  read("frequency_penalty", result.frequency_penalty);
  read("logit_bias", result.logit_bias);
  read("allowed", result.allowed);
  read("bad_words", result.bad_words);
  read("stop_token_ids", result.stop_token_ids);
  read("min_tokens", result.min_tokens);
  read("seed", result.seed);
  read("logprobs", result.logprobs);
  read("prompt_logprobs", result.prompt_logprobs);
  if (known != config.size()) {
    throw std::invalid_argument(std::string("unknown field among ") + nb::repr(config.attr("keys")()).c_str() +
                                "; the fields are those of SamplingConfig in sampling_state.h");
  }
  return result;
}

using Result = nb::typed<nb::dict, nb::str, nb::any>;

Result dict_of(std::int32_t token, const std::optional<TokenLogprobs>& logprobs) {
  nb::dict result;
  result["token"] = token;
  result["logprob"] = logprobs ? nb::cast(logprobs->logprob) : nb::none();
  result["rank"] = logprobs ? nb::cast(logprobs->rank) : nb::none();
  result["top_ids"] = logprobs ? nb::cast(logprobs->top_ids) : nb::none();
  result["top_logprobs"] = logprobs ? nb::cast(logprobs->top_logprobs) : nb::none();
  return result;
}

Result sample_row(const Logits& logits, const Tokens& tokens, std::int64_t num_prompt_tokens, std::int64_t position,
                  const Result& config, TokenRule* rule) {
  const SamplingState state(config_of(config), tokens, num_prompt_tokens, static_cast<std::int32_t>(logits.size()));
  std::vector<float> row(logits.data(), logits.data() + logits.size());
  SamplerScratch scratch;
  const SampleResult result = sample(row, state, tokens, position, scratch, rule);
  return dict_of(result.token, result.logprobs);
}

Result token_logprobs(const Logits& logits, std::int32_t token, std::int32_t top_n) {
  SamplerScratch scratch;
  return dict_of(token, logprobs_of({logits.data(), logits.size()}, token, top_n, scratch));
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("philox_block", &philox_block, "counter"_a, "key"_a, "Philox4x32-10.");
  m.def("philox", &uniform, "seed"_a, "position"_a, "draw"_a = 0, "The number in [0, 1) drawn at a position.");
  m.def("sample", &sample_row, "logits"_a, "tokens"_a, "num_prompt_tokens"_a, "position"_a, "config"_a,
        "rule"_a.none() = nb::none(), "One draw with a fresh state, for tests: config holds fields of SamplingConfig.");
  m.def("token_logprobs", &token_logprobs, "logits"_a, "token"_a, "top_n"_a,
        "Log probability and rank of a token, and the likeliest tokens.");
}

}  // namespace quire
