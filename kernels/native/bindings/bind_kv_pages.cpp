#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "compute/runner.h"
#include "kv_cache/kv_cache.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

/// KV pages in a file without a model. Their size does not depend on the number of their tokens.
class KvPages {
 public:
  KvPages(Device& device, std::int32_t fd, const std::string& model, std::int32_t num_pages, std::int32_t block_size,
          std::int64_t page_bytes, std::int32_t vocab_size)
      : cache_(
            KvConfig{{{{1, page_bytes, page_bytes}}, kTileTokens, num_pages}, block_size, vocab_size, {}, fd, model, 1},
            device) {
    if (!device.in_host_memory()) throw std::invalid_argument("pages without a model can't lie in memory of a GPU");
  }

  KvCache& kv_cache() { return cache_; }
  std::span<std::uint8_t> tiles() const {
    const KvMemory& memory = cache_.memory;
    return {reinterpret_cast<std::uint8_t*>(memory.layer(0)),
            static_cast<std::size_t>(memory.shape().num_pages) * memory.page_bytes()};
  }

 private:
  KvCache cache_;
};

using Copy = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstCopy = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
constexpr double kMostSeconds = 3600;  // that a thread waits for sealed pages

using Sealed = std::tuple<std::int32_t, nb::bytes, nb::bytes, std::uint64_t>;

std::vector<Sealed> take_sealed(SealedQueue& queue, std::size_t most, double seconds) {
  if (!(seconds >= 0 && seconds <= kMostSeconds))
    throw std::invalid_argument("seconds=" + std::to_string(seconds) + "; give 0 to " + std::to_string(kMostSeconds));
  std::vector<SealedPage> pages;
  {
    const nb::gil_scoped_release unlocked;
    pages = queue.take(most, std::chrono::duration<double>(seconds));
  }
  std::vector<Sealed> taken;
  for (const SealedPage& page : pages)
    taken.emplace_back(page.page, bytes_of(page.prefix), bytes_of(page.key), page.seal);
  return taken;
}

/// Returns the queues of sealed pages, which keep their owner alive.
template <class Owner>
nb::typed<nb::list, SealedQueue> sealed_queues(const nb::typed<nb::object, Owner>& owner) {
  nb::list queues;
  SealedPages* pages = nb::cast<Owner&>(owner).kv_cache().sealed_pages.get();
  if (pages == nullptr) return queues;
  for (SealedQueue& queue : pages->queues()) queues.append(nb::cast(&queue, nb::rv_policy::reference_internal, owner));
  return queues;
}

/// Binds what the owner of a KvCache tells of its pages.
template <class Owner>
void bind_pages(nb::class_<Owner>& owner) {
  owner
      .def(
          "copy_page",
          [](Owner& o, std::int32_t page, const Copy& copy) {
            return o.kv_cache().copy_page(page, std::as_writable_bytes(std::span(copy.data(), copy.size())));
          },
          "page"_a, "copy"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Copy the KV of a page to `copy`, `page_bytes` bytes; return the checksum of the copy.")
      .def(
          "fill_page",
          [](Owner& o, std::int32_t page, const ConstCopy& copy) {
            return o.kv_cache().fill_page(page, std::as_bytes(std::span(copy.data(), copy.size())));
          },
          "page"_a, "copy"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Fill a page that nobody else uses with a copy of one; return its checksum.")
      .def_prop_ro("sealed_queues", &sealed_queues<Owner>,
                   "Queues of the pages that were sealed, one for each thread that copies them elsewhere.")
      .def_prop_ro("page_bytes", [](Owner& o) { return o.kv_cache().memory.page_bytes(); })
      .def_prop_ro(
          "num_taken_over_pages",
          [](Owner& o) {
            const PageLedger* ledger = o.kv_cache().ledger.get();
            return ledger == nullptr ? 0 : ledger->num_taken_over();
          },
          "Number of KV pages that an earlier process left.")
      .def_prop_ro(
          "num_dropped_pages",
          [](Owner& o) {
            const PageLedger* ledger = o.kv_cache().ledger.get();
            return ledger == nullptr ? 0 : ledger->num_dropped();
          },
          "Number of KV pages that an earlier process left damaged, or without the pages before them.")
      .def_prop_ro(
          "sequences", [](Owner& o) -> Sequences& { return o.kv_cache().sequences; },
          nb::rv_policy::reference_internal);
}

}  // namespace

void bind_kv_pages(nb::module_& m, nb::class_<Runner>& runner) {
  nb::class_<SealedQueue>(m, "SealedQueue", "A queue of the pages that were sealed, of which it has all.")
      .def("take", &take_sealed, "most"_a, "seconds"_a,
           "Wait so long for a page to be sealed, and return the oldest ones in turn: page, key of the prefix before "
           "it, key of the prefix that it ends, and its seal.")
      .def(
          "is_sealed", &SealedQueue::is_sealed, "page"_a, "seal"_a,
          "Return whether a page still has a seal: if it has, what was copied of it before is that of the sealed page.")
      .def_prop_ro("num_left_out", &SealedQueue::num_left_out,
                   "Number of sealed pages that `take` has left out, since it was called too rarely.");
  bind_pages(runner);
  nb::class_<KvPages> pages(m, "KvPages",
                            "KV pages in a file without a model, and their sequences, for executors that compute "
                            "elsewhere.");
  pages
      .def(
          nb::init<Device&, std::int32_t, const std::string&, std::int32_t, std::int32_t, std::int64_t, std::int32_t>(),
          "device"_a, "kv_memory_fd"_a, "kv_model"_a, "num_pages"_a, "block_size"_a, "page_bytes"_a, "vocab_size"_a,
          nb::keep_alive<1, 2>())
      .def_prop_ro(
          "tiles",
          [](KvPages& p) {
            const std::span<std::uint8_t> tiles = p.tiles();
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(tiles.data(), {tiles.size()});
          },
          nb::rv_policy::reference_internal, "The KV of all pages, [pages][page_bytes], to be read and written.")
      .def(
          "seal", [](KvPages& p) { p.kv_cache().ledger->seal(); },
          "Seal the pages that have come into the prefix cache, once all that they hold is written.");
  bind_pages(pages);
}

}  // namespace quire
