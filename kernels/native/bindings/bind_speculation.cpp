#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bindings/bind_struct.h"
#include "bindings/bindings.h"
#include "speculation/text_proposer.h"
#include "speculation/token_index.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Integers = std::vector<std::int32_t>;

std::vector<std::pair<TokenIndex::Place, std::int32_t>> find_places(const TokenIndex& index, const Integers& sequence,
                                                                    std::int32_t longest, std::int32_t most_places) {
  std::vector<TokenIndex::Match> found;
  index.find(sequence, longest, most_places, found);
  std::vector<std::pair<TokenIndex::Place, std::int32_t>> places;
  for (const TokenIndex::Match& match : found) places.emplace_back(match.place, match.length);
  return places;
}

}  // namespace

void bind_speculation(nb::module_& m) {
  using Config = TextProposerConfig;
  nb::class_<TokenIndex>(m, "TokenIndex", "Texts, and where in them the last tokens of a sequence occurred before.")
      .def(nb::init<std::int32_t, std::int64_t>(), "run"_a, "capacity"_a)
      .def("append", &TokenIndex::append, "token"_a)
      .def("end_text", &TokenIndex::end_text)
      .def("forget_before", &TokenIndex::forget_before, "place"_a)
      .def("token", &TokenIndex::token, "place"_a)
      .def("find", &find_places, "sequence"_a, "longest"_a, "most_places"_a,
           "Return the places after the longest matches, the latest first, and the length of the match.")
      .def_prop_ro("end", &TokenIndex::end);
  bind_struct(m, "TextProposerConfig", "What a TextProposer looks for.",
              option("shortest", &Config::shortest, "Fewest tokens that have to match."),
              option("longest", &Config::longest, "Most tokens that are compared."),
              option("majority", &Config::majority, "Of several places, go on as most of them do."),
              option("most_answers", &Config::most_answers, "Of ended sequences, for each salt; 0: own text only."),
              option("own_text", &Config::own_text, "Look in the sequence's own text, not only in what was predicted."),
              option("factor", &Config::factor, "Most drafts for each token that matches; 0: no such bound."));
  nb::class_<TextProposer>(m, "TextProposer",
                           "Proposes what followed the last tokens of a sequence where they occurred before.")
      .def(nb::init<Sequences&, const Config&>(), "sequences"_a, "config"_a, nb::keep_alive<1, 2>())
      .def(
          "propose",
          [](TextProposer& self, const Integers& slots, const Integers& most, double least) {
            return self.propose(slots, most, least);
          },
          "slots"_a, "most"_a, "least"_a,
          "Append at most `most[i]` drafts of a probability of `least` or more to each sequence; return how many.")
      .def(
          "learn",
          [](TextProposer& self, const Integers& slots, const Integers& accepted) { self.learn(slots, accepted); },
          "slots"_a, "accepted"_a, "Note how many of the drafts that were proposed last for each slot have held.")
      .def(
          "predict", [](TextProposer& self, std::int32_t slot, const Integers& tokens) { self.predict(slot, tokens); },
          "slot"_a, "token_ids"_a, "Take this text for what the sequence will probably say.")
      .def("end", &TextProposer::end, "slot"_a, "Keep the answer of a sequence that is about to be closed.")
      .def("acceptance", &TextProposer::acceptance, "length"_a);
}

}  // namespace quire
