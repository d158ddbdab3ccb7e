#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "sampling/device_sampling.h"
#include "sampling/philox.h"
#include "sampling/sampler.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<std::int32_t>;

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
                  const SamplingConfig& config, TokenConstraint* constraint) {
  const SamplingState state(config, tokens, num_prompt_tokens, static_cast<std::int32_t>(logits.size()));
  std::vector<float> row(logits.data(), logits.data() + logits.size());
  SamplerScratch scratch;
  const SampleResult result = sample(row, state, tokens, position, scratch, constraint);
  return dict_of(result.token, result.logprobs);
}

Result token_logprobs(const Logits& logits, std::int32_t token, std::int32_t top_n) {
  SamplerScratch scratch;
  return dict_of(token, logprobs_of({logits.data(), logits.size()}, token, top_n, scratch));
}

nb::bytes bytes_of(std::span<const std::byte> bytes) { return nb::bytes(bytes.data(), bytes.size()); }

SampleRequests requests_for(std::int32_t vocab_size) {
  SamplingState({}, {}, 0, vocab_size);  // throws for a size that is out of range
  return SampleRequests(vocab_size);
}

nb::bytes row_to_sample(SampleRequests& requests, const SamplingConfig& config, const Tokens& tokens,
                        std::int64_t num_prompt_tokens, std::int64_t position, const TokenMask* mask, bool was_tried) {
  const SamplingState state(config, tokens, num_prompt_tokens, requests.vocab_size());
  const SampleRow row = requests.sample(state, tokens, position, mask != nullptr, mask, was_tried);
  return nb::bytes(&row, sizeof row);
}

nb::bytes row_to_report(const SampleRequests& requests, std::int32_t token, std::int32_t top) {
  if (token < 0 || token >= requests.vocab_size() || top < 0 || top > requests.vocab_size())
    throw std::invalid_argument("token " + std::to_string(token) + " and its " + std::to_string(top) +
                                " likeliest asked of a vocabulary of " + std::to_string(requests.vocab_size()));
  const SampleRow row = requests.report(token, top);
  return nb::bytes(&row, sizeof row);
}

template <class T>
T from_bytes(const nb::bytes& bytes) {
  T value;
  if (bytes.size() != sizeof value) throw std::invalid_argument("these are not the bytes of a row");
  std::memcpy(&value, bytes.c_str(), sizeof value);
  return value;
}

std::optional<std::int32_t> token_of_rows(const nb::bytes& asked_bytes, const nb::bytes& row_bytes,
                                          TokenConstraint* constraint) {
  const auto asked = from_bytes<SampleRow>(asked_bytes);
  const auto row = from_bytes<SampledRow>(row_bytes);
  if (row.num_tried < 0 || row.num_tried > kMostTries || (asked.tries > 0 && constraint == nullptr))
    throw std::invalid_argument("these rows have no such token");
  return token_of(asked, row, constraint);
}

Result result_of_rows(const nb::bytes& asked_bytes, const nb::bytes& row_bytes, const nb::bytes& listed_bytes,
                      std::int32_t vocab_size) {
  const auto asked = from_bytes<SampleRow>(asked_bytes);
  const auto row = from_bytes<SampledRow>(row_bytes);
  const std::size_t count = asked.top > kMostTop ? static_cast<std::size_t>(asked.top) : 0;
  if (listed_bytes.size() < count * sizeof(LikelyToken)) throw std::invalid_argument("these rows have no such result");
  std::vector<LikelyToken> listed(count);
  if (count > 0) std::memcpy(listed.data(), listed_bytes.c_str(), count * sizeof(LikelyToken));
  check_good(row, vocab_size);
  const SampleResult result = result_of(asked, row, row.token, std::move(listed));
  return dict_of(result.token, result.logprobs);
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("philox_block", &philox_block, "counter"_a, "key"_a, "Return a block of Philox4x32-10.");
  m.def("philox", &uniform, "seed"_a, "position"_a, "index"_a = 0,
        "Return random number `index` in [0, 1) of a position.");
  m.def("sample", &sample_row, "logits"_a, "tokens"_a, "num_prompt_tokens"_a, "position"_a, "config"_a,
        "constraint"_a.none() = nb::none(), "Sample one token with a fresh state, for tests.");
  m.def("token_logprobs", &token_logprobs, "logits"_a, "token"_a, "top_n"_a,
        "Return the log probability and rank of a token, and the likeliest tokens.");
  nb::class_<SampleRequests>(m, "SampleRequests", "Sampling requests for a device; for tests.")
      .def(nb::new_(&requests_for), "vocab_size"_a)
      .def("sample", &row_to_sample, "config"_a, "tokens"_a, "num_prompt_tokens"_a, "position"_a,
           "mask"_a.none() = nb::none(), "was_tried"_a = false,
           "Return the bytes of the SampleRow for a sample, if it `was_tried` after those that the mask has not "
           "allowed.")
      .def("report", &row_to_report, "token"_a, "top"_a,
           "Return the bytes of the SampleRow for the log probabilities of a token and of the likeliest ones.")
      .def_prop_ro(
          "edits", [](const SampleRequests& r) { return bytes_of(std::as_bytes(r.edits())); },
          "The bytes of the edits of all rows.")
      .def_prop_ro(
          "masks", [](const SampleRequests& r) { return bytes_of(std::as_bytes(r.masks())); },
          "The bytes of the masks of all rows.");
  m.def("sampled_token", &token_of_rows, "asked"_a, "row"_a, "constraint"_a.none() = nb::none(),
        "Return the token that a device has sampled of a row, None if the constraint allows none of those that it has "
        "tried; for tests.");
  m.def("sampled", &result_of_rows, "asked"_a, "row"_a, "listed"_a, "vocab_size"_a,
        "Return what a device has sampled of a row, as `sample` would return it; `listed` are the bytes of its row of "
        "changed logits. For tests.");
}

}  // namespace quire
