#include <nanobind/ndarray.h>

#include <cerrno>
#include <exception>
#include <system_error>

#include "bindings/bindings.h"
#include "checksum/checked_file.h"
#include "checksum/checksum.h"
#include "compute/device.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::uint64_t checksum_of(const Bytes& bytes) { return checksum(std::as_bytes(std::span(bytes.data(), bytes.size()))); }

std::span<std::byte> memory_of(Device& device, Address address, std::size_t num_bytes) {
  auto* memory = reinterpret_cast<std::byte*>(address);
  device.check(memory, num_bytes);
  return {memory, num_bytes};
}

void raise_os_error(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
  }
}

}  // namespace

void bind_checksum(nb::module_& m) {
  nb::register_exception_translator(raise_os_error);
  m.def("checksum", &checksum_of, "data"_a, nb::call_guard<nb::gil_scoped_release>(),
        "Return the XXH3 (64 bits) of bytes.");
}

void bind_checked_file(nb::class_<Device>& device) {
  device
      .def(
          "read_part",
          [](Device& d, int descriptor, std::uint64_t offset, Address address, std::size_t num_bytes) {
            return read_part(d, descriptor, offset, memory_of(d, address, num_bytes));
          },
          "descriptor"_a, "offset"_a, "address"_a, "num_bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Read part of an open file into memory of the device and return its checksum, that of the checksums of "
          "its MiB. Raises OSError.")
      .def(
          "write_part",
          [](Device& d, int descriptor, std::uint64_t offset, Address address, std::size_t num_bytes) {
            return write_part(d, descriptor, offset, memory_of(d, address, num_bytes));
          },
          "descriptor"_a, "offset"_a, "address"_a, "num_bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Write memory of the device to part of an open file and return its checksum, as `read_part` does.");
}

}  // namespace quire
