#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <span>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "compute/runner.h"
#include "kv_cache/page_io.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Copy = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstCopy = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sealed = std::tuple<std::int32_t, nb::bytes, nb::bytes, std::uint64_t>;

SealedPages& log_of(Runner& runner) {
  if (runner.sealed_pages() == nullptr) throw std::logic_error("this runner does not log its sealed pages");
  return *runner.sealed_pages();
}

std::vector<Sealed> take_sealed(Runner& runner, std::size_t most, double seconds) {
  std::vector<SealedPage> pages;
  {
    const nb::gil_scoped_release unlocked;
    pages = log_of(runner).take(most, std::chrono::duration<double>(seconds));
  }
  std::vector<Sealed> taken;
  for (const SealedPage& page : pages)
    taken.emplace_back(page.page, bytes_of(page.prefix), bytes_of(page.key), page.content);
  return taken;
}

}  // namespace

void bind_page_io(nb::class_<Runner>& runner) {
  runner
      .def(
          "copy_page",
          [](Runner& r, std::int32_t page, const Copy& copy) {
            return copy_page(r.kv(), page, std::as_writable_bytes(std::span(copy.data(), copy.size())));
          },
          "page"_a, "copy"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Copy the KV of a page to `copy`, `page_bytes` bytes; return the checksum of the copy, which shows whether "
          "the "
          "page has changed meanwhile.")
      .def(
          "fill_page",
          [](Runner& r, std::int32_t page, const ConstCopy& copy) {
            return fill_page(r.kv(), page, std::as_bytes(std::span(copy.data(), copy.size())));
          },
          "page"_a, "copy"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Fill a page that nobody else uses with a copy of one; return its checksum.")
      .def("take_sealed", &take_sealed, "most"_a, "seconds"_a,
           "Wait so long for a page to be sealed, and return the oldest ones in turn: page, key of the prefix before "
           "it, key of the prefix that it ends, and checksum of its KV.")
      .def_prop_ro("page_bytes", [](Runner& r) { return r.kv().page_bytes(); })
      .def_prop_ro(
          "num_sealed_left_out", [](Runner& r) { return log_of(r).num_left_out(); },
          "Number of sealed pages that `take_sealed` has left out, since it was called too rarely.");
}

}  // namespace quire
