#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "bindings/bindings.h"
#include "kv_cache/prefix_watch.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

/// Returns a key as those who keep an outline of the cache elsewhere know it.
std::uint64_t short_key(const PrefixKey& key) {
  std::uint64_t value;
  std::memcpy(&value, key.data(), sizeof value);
  return value;
}

std::vector<std::uint64_t> short_keys(const std::vector<PrefixKey>& keys) {
  std::vector<std::uint64_t> values(keys.size());
  std::ranges::transform(keys, values.begin(), short_key);
  return values;
}

std::vector<std::uint64_t> add_salts(PrefixWatch& watch, const std::vector<std::string>& salts) {
  nb::gil_scoped_release release;
  return short_keys(watch.add_salts(salts));
}

using StoredRunTuple = std::tuple<std::optional<std::uint64_t>, std::uint64_t, bool, std::vector<std::uint64_t>,
                                  std::vector<std::int32_t>>;

std::pair<std::vector<std::uint64_t>, std::vector<StoredRunTuple>> take(PrefixWatch& watch, std::int32_t most) {
  PrefixChanges changes;
  {
    nb::gil_scoped_release release;
    changes = watch.take(most);
  }
  std::vector<StoredRunTuple> stored;
  for (StoredRun& run : changes.stored) {
    const auto parent = run.parent ? std::optional(short_key(*run.parent)) : std::nullopt;
    stored.emplace_back(parent, short_key(run.root), run.is_salted, short_keys(run.keys), std::move(run.tokens));
  }
  return {short_keys(changes.removed), std::move(stored)};
}

}  // namespace

void bind_prefix_watch(nb::module_& m) {
  nb::class_<PrefixWatch>(m, "PrefixWatch",
                          "Follows the prefix cache as long as it exists. Prefixes are known by 64 bits of their keys.")
      .def("add_salts", &add_salts, "salts"_a,
           "Watch the prefixes under further salts; return the keys of their empty prefixes.")
      .def("take", &take, "most"_a,
           "Return changes since the last call, of `most` pages at most: the keys of prefixes that the cache has lost, "
           "and runs of pages that it has gained: tuples of the key of the prefix before it or None, that of the empty "
           "prefix under its salt, whether it is salted, the key of the prefix that ends with each page, and the "
           "tokens of all.")
      .def_prop_ro("has_changes", &PrefixWatch::has_changes, "True if `take` has changes to return.");
}

}  // namespace quire
