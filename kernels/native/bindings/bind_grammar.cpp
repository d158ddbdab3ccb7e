#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "grammar/constraint.h"
#include "grammar/llguidance.h"
#include "grammar/token_constraint.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Tokens = std::vector<std::int32_t>;

constexpr double kLongestWait = 1e9;  // seconds

/// Calls a Python function on the thread that asks a grammar. No exception may pass through llguidance: where there is
/// one, no token is forced.
Vocabulary::Tokenize tokenize_by(nb::callable function) {
  const auto release = [](nb::callable* held) {
    const nb::gil_scoped_acquire acquire;
    delete held;
  };
  const std::shared_ptr<nb::callable> held(new nb::callable(std::move(function)), release);
  return [held](std::string_view text) -> Vocabulary::Tokens {
    const nb::gil_scoped_acquire acquire;
    try {
      return nb::cast<Vocabulary::Tokens>((*held)(nb::bytes(text.data(), text.size())));
    } catch (const std::exception&) {
      return {};
    }
  };
}

void bind_mask(nb::module_& m) {
  nb::class_<TokenConstraint>(m, "TokenConstraint",
                              "Restricts the next token of a sequence, whatever else its request asked for.")
      .def(
          "wait",
          [](TokenConstraint& constraint, double seconds) {
            if (!(seconds >= 0 && seconds <= kLongestWait))
              throw std::invalid_argument("seconds=" + std::to_string(seconds) + "; give 0 to " +
                                          std::to_string(kLongestWait));
            const auto longest =
                std::chrono::duration_cast<TokenConstraint::Clock::duration>(std::chrono::duration<double>(seconds));
            return constraint.wait_until(TokenConstraint::Clock::now() + longest);
          },
          "seconds"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Wait until it can be asked; return False if another thread still writes its mask then.")
      .def("allows", &TokenConstraint::allows, "token_id"_a)
      .def("follow", &TokenConstraint::follow, "token_id"_a, "Advance past a token that was sampled.")
      .def("take_forced", &TokenConstraint::take_forced,
           "Advance past the next token if there is no choice, and return it, or None.")
      .def("rollback", &TokenConstraint::rollback, "num_tokens"_a,
           "Go back by the last tokens that it has advanced past.")
      .def_prop_ro("mask", &TokenConstraint::mask, nb::rv_policy::reference_internal);
  nb::class_<TokenMask, TokenConstraint>(m, "TokenMask", "The tokens that may come next: a bit for each.")
      .def(nb::init<std::int32_t>(), "num_tokens"_a)
      .def_prop_ro("token_ids",
                   [](const TokenMask& mask) {
                     Tokens tokens;
                     mask.for_each_allowed([&](std::int32_t token) { tokens.push_back(token); });
                     return tokens;
                   })
      .def_prop_ro("is_ready", &TokenMask::is_ready)
      .def("reset", &TokenMask::reset, "Start to write it: the sampler waits for `publish`.")
      .def("publish", &TokenMask::publish, "Let the sampler read it: it is written.")
      .def("allow", [](TokenMask& mask, const Tokens& tokens) { mask.set(tokens, true); }, "token_ids"_a);
}

}  // namespace

void bind_grammar(nb::module_& m) {
  bind_mask(m);
  nb::class_<Vocabulary>(m, "Vocabulary", "The text of each token, and a tokenizer, for grammars.")
      .def(
          "__init__",
          [](Vocabulary* self, const std::string& library, const std::vector<nb::bytes>& texts,
             const Tokens& eos_token_ids, nb::typed<nb::callable, Tokens(nb::bytes)> tokenize) {
            std::vector<std::string> copies;
            for (const nb::bytes& text : texts) copies.emplace_back(text.c_str(), text.size());
            const Vocabulary::Tokenize function = tokenize_by(std::move(tokenize));
            const nb::gil_scoped_release release;
            new (self) Vocabulary(library, copies, eos_token_ids, function);
          },
          "library"_a, "texts"_a, "eos_token_ids"_a, "tokenize"_a)
      .def_prop_ro("num_tokens", &Vocabulary::num_tokens);
  nb::class_<Matcher>(m, "Matcher", "The beginning of a grammar.")
      .def(nb::init<std::shared_ptr<const Vocabulary>, const std::string&, const std::string&>(), "vocabulary"_a,
           "kind"_a, "grammar"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("allows_any", &Matcher::allows_any, nb::call_guard<nb::gil_scoped_release>(),
           "Return True if any text is allowed. Copies made later benefit from the work that this takes.")
      .def_prop_ro("error", &Matcher::error, "The reason why it cannot go on.");
  nb::class_<Constraint, TokenConstraint>(m, "Constraint", "The position of a request in its grammar.")
      .def(nb::init<const Matcher&, std::int32_t, Tokens>(), "grammar"_a, "vocab_size"_a, "stop_token_ids"_a)
      .def("restart", &Constraint::restart,
           "Go back to the beginning, for another request; return False if it cannot, and must not be used again.")
      .def(
          "replay", [](Constraint& self, const Tokens& tokens) { self.replay(tokens); }, "token_ids"_a,
          "Advance past tokens that were generated before; ValueError for one that the grammar does not allow.")
      .def_prop_ro("num_followed", &Constraint::num_followed,
                   "Number of tokens that it has advanced past for all its requests.")
      .def("stop_at", &Constraint::stop_at, "stop_token_ids"_a, "Replace the stop tokens, at the beginning.")
      .def_prop_ro(
          "forced", [](const Constraint& self) { return Tokens(self.forced().begin(), self.forced().end()); },
          "Tokens that must come next.")
      .def(
          "num_allowed", [](Constraint& self, const Tokens& tokens) { return self.num_allowed(tokens); }, "token_ids"_a,
          "Return how many of the tokens may come next, in this order, as far as that can be told without a mask.")
      .def_prop_ro("is_complete", &Constraint::is_complete, "True if the text is complete, and nothing may follow.")
      .def_prop_ro("has_ended", &Constraint::has_ended, "True if no token may follow, or there is an error.")
      .def_prop_ro("error", &Constraint::error, "The reason why it cannot go on.")
      .def_prop_ro("mask_seconds", &Constraint::mask_seconds, "Seconds that the next mask is likely to take.")
      .def("begin_mask", &Constraint::begin_mask,
           "Claim the mask for the caller to write; return False if that is not necessary.")
      .def("write_mask", &Constraint::write_mask, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace quire
