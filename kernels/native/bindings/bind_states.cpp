#include <nanobind/ndarray.h>

#include <cstdint>
#include <span>
#include <stdexcept>

#include "bindings/bind_struct.h"
#include "bindings/bindings.h"
#include "kv_cache/state_store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

void bind_states(nb::module_& m) {
  bind_struct(m, "StateShape", "Records of what layers keep in place of keys and values, and the rule of snapshots.",
              field("record_bytes", &StateShape::record_bytes, "Of all layers together; 0: no state."),
              field("num_records", &StateShape::num_records,
                    "Those of sequences that have pages, and of snapshots; 2 at least."),
              option("snapshot_pages", &StateShape::snapshot_pages,
                     "Length of the first snapshot of a long prompt; 0: of its end alone."),
              option("piece_bytes", &StateShape::piece_bytes,
                     "Of the pieces in which records are copied, as large as a page; 0: they are not copied."))
      .def_prop_ro("bytes", &StateShape::bytes, "Memory that the records take.");
  nb::class_<StateStore>(m, "StateStore", "The records of state that sequences and the prefix cache have.")
      .def(
          "record",
          [](StateStore& s, std::int32_t record) {
            if (!s.in_host_memory()) throw std::invalid_argument("the records are memory of a GPU");
            const std::span<std::byte> bytes = s.record(record);
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(bytes.data(), {bytes.size()});
          },
          "record"_a, nb::rv_policy::reference_internal,
          "Return the bytes of a record, to be read and written. Raises ValueError for those of a GPU.")
      .def("snapshot", &StateStore::snapshot, "page"_a, "Return the record of a page's snapshot, or -1.")
      .def_prop_ro("free_records", &StateStore::free_records)
      .def_prop_ro("cached_records", &StateStore::cached_records, "Snapshots that no sequence holds.")
      .def_prop_ro("held_records", &StateStore::held_records)
      .def_prop_ro("num_evicted", &StateStore::num_evicted, "Snapshots that gave way to other states.")
      .def_prop_ro("total", &StateStore::total);
}

}  // namespace quire
