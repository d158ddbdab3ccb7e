#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "compute/cpu_device.h"
#include "compute/cuda_device.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

Dim dim_of(std::string_view name) {
  const auto found = std::ranges::find(kDimNames, name);
  if (found != kDimNames.end()) return static_cast<Dim>(found - kDimNames.begin());
  std::string known;
  for (std::string_view each : kDimNames) known.append(known.empty() ? "" : ", ").append(each);
  throw std::invalid_argument("dim '" + std::string(name) + "' is none of " + known);
}

Dims dims_of(const Sizes& sizes) {
  constexpr std::int64_t kMost = std::int64_t{1} << 31;
  Dims dims{};
  for (const auto& [name, size] : sizes) {
    if (size < 0 || size > kMost)
      throw std::invalid_argument(name + "=" + std::to_string(size) + "; it must be from 0 to " +
                                  std::to_string(kMost));
    dims[static_cast<std::size_t>(dim_of(name))] = size;
  }
  return dims;
}

namespace {

void add_launch(Plan& plan, Address kernel, const std::vector<Address>& buffers, const std::string& dim,
                std::int64_t rows_per_item, std::int64_t repeats, std::int64_t copies, std::int64_t groups) {
  Launch launch{kernel, {}, dim_of(dim), rows_per_item, repeats, copies, groups};
  for (Address buffer : buffers) launch.buffers.push_back(reinterpret_cast<void*>(buffer));
  plan.add(std::move(launch));
}

constexpr std::size_t kClearedAtOnce = std::size_t{1} << 20;

Address address_of(const void* memory) { return reinterpret_cast<Address>(memory); }

using Array = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Pages = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Address upload(Device& device, const Array& array) {
  std::byte* target = device.allocate(array.nbytes());
  device.write(target, {static_cast<const std::byte*>(array.data()), array.nbytes()});
  return address_of(target);
}

void write(Device& device, Address address, const Array& array) {
  auto* target = reinterpret_cast<std::byte*>(address);
  device.check(target, array.nbytes());
  device.write(target, {static_cast<const std::byte*>(array.data()), array.nbytes()});
}

void read(const Device& device, Address address, const Bytes& bytes) {
  auto* source = reinterpret_cast<std::byte*>(address);
  device.check(source, bytes.nbytes());
  device.read(std::as_writable_bytes(std::span(bytes.data(), bytes.nbytes())), source);
}

void clear(const Device& device, Address address, std::size_t bytes) {
  auto* memory = reinterpret_cast<std::byte*>(address);
  device.check(memory, bytes);
  device.write(split({memory, bytes}, kClearedAtOnce), [](std::size_t, Runs host) {
    for (const std::span<std::byte> run : host) std::ranges::fill(run, std::byte{0});
  });
}

}  // namespace

void bind_device(nb::module_& m) {
  nb::class_<Plan>(m, "Plan", "Kernel launches that run one after the other.")
      .def(nb::init<>())
      .def("add", &add_launch, "kernel"_a, "buffers"_a, "dim"_a, "rows_per_item"_a = 1, "repeats"_a = 1, "copies"_a = 1,
           "groups"_a = 0,
           "Append a launch of `repeats * ceil(dims[dim] / rows_per_item)` work items, or with `groups` of as many as "
           "parts of `copies * dims[dim]` rows in groups can be.");
  nb::class_<MatrixBuffer>(m, "MatrixBuffer", "Where the host writes the matrices of a device, one after the other.")
      .def(
          "begin",
          [](MatrixBuffer& buffer, Address address, std::size_t bytes) {
            return address_of(buffer.begin({reinterpret_cast<std::byte*>(address), bytes}));
          },
          "address"_a, "num_bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Return the address of zeroed memory for a matrix: its own, which must be zero, or that of a buffer.")
      .def("end", &MatrixBuffer::end, nb::call_guard<nb::gil_scoped_release>(),
           "End it: the matrix is in its own memory then.");
  nb::class_<Device> device(m, "Device", "What computes a model: memory, and launches over it.");
  device
      .def(
          "allocate", [](Device& d, std::size_t bytes) { return address_of(d.allocate(bytes)); }, "num_bytes"_a,
          nb::call_guard<nb::gil_scoped_release>(),
          "Return the address of zeroed memory that lives as long as the device.")
      .def(
          "allocate_exchanged", [](Device& d, std::size_t bytes) { return address_of(d.allocate_exchanged(bytes)); },
          "num_bytes"_a, "Allocate memory that the host writes or reads in each step.")
      .def(
          "allocate_matrix", [](Device& d, std::size_t bytes) { return address_of(d.allocate_matrix(bytes)); },
          "num_bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Allocate memory for a matrix, each part of its columns near the units that will read it.")
      .def("matrix_buffer", &Device::matrix_buffer, nb::keep_alive<0, 1>(), "Return what matrices are written through.")
      .def(
          "place_matrix",
          [](Device& d, Address address, std::size_t bytes) {
            auto* memory = reinterpret_cast<std::byte*>(address);
            d.check(memory, bytes);
            d.place_matrix(memory, bytes);
          },
          "address"_a, "num_bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Prepare memory of a file for a matrix, each part of its columns near the units that will read it.")
      .def(
          "map_file",
          [](Device& d, int descriptor, std::size_t bytes, bool writable) {
            return address_of(d.map_file(descriptor, bytes, writable));
          },
          "descriptor"_a, "num_bytes"_a, "writable"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Map the first bytes of a file, which must have as many; return the address, which is good as long as the "
          "device lives. Raises OSError.")
      .def(
          "make_read_only", [](Device& d, Address address) { d.make_read_only(reinterpret_cast<std::byte*>(address)); },
          "address"_a, nb::call_guard<nb::gil_scoped_release>(),
          "End the writing to a file that was mapped here, from its first byte on. Raises OSError.")
      .def("upload", &upload, "array"_a, nb::call_guard<nb::gil_scoped_release>(),
           nb::sig("def upload(self, array: numpy.typing.NDArray[typing.Any]) -> int"),
           "Copy the array into memory that lives as long as the device; return its address.")
      .def("write", &write, "address"_a, "array"_a, nb::call_guard<nb::gil_scoped_release>(),
           nb::sig("def write(self, address: int, array: numpy.typing.NDArray[typing.Any]) -> None"),
           "Copy the array to memory of the device.")
      .def("read", &read, "address"_a, "array"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Copy memory of the device to the array.")
      .def("clear", &clear, "address"_a, "num_bytes"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Clear memory of the device.")
      .def(
          "page_list", [](Device& d, const Pages& pages) { return d.page_list({pages.data(), pages.size()}); },
          "pages"_a, "Return the value by which kernels find pages, whose numbers must stay where they are.")
      .def(
          "run", [](Device& d, const Plan& plan, const Sizes& sizes) { d.run(plan, dims_of(sizes)); }, "plan"_a,
          "dims"_a, nb::call_guard<nb::gil_scoped_release>(), "Run the launches of a plan with these dims, by name.")
      .def(
          "profile", [](Device& d, const Plan& plan, const Sizes& sizes) { return d.profile(plan, dims_of(sizes)); },
          "plan"_a, "dims"_a, nb::call_guard<nb::gil_scoped_release>(),
          "Run the launches and return the seconds of each.");
  device.def_prop_ro("threads", [](const Device& d) { return d.threads().size(); }, "Number of threads of the host.");
  bind_checked_file(device);
  bind_packing(device);
  nb::class_<CpuDevice, Device>(m, "CpuDevice", "The CPUs of this host; the threads run the kernels.")
      .def(nb::init<ThreadPool&>(), "threads"_a, nb::keep_alive<1, 2>());
  nb::exception<DeviceLost>(m, "DeviceLostError", PyExc_RuntimeError);
  nb::class_<CudaDevice, Device>(m, "CudaDevice", "One of NVIDIA's GPUs, whose driver must be installed.")
      .def(
          "__init__",
          [](CudaDevice* self, int ordinal, ThreadPool& threads, const std::string& cache_dir, Warn warn) {
            new (self) CudaDevice(ordinal, threads, cache_dir, std::move(warn));
          },
          "ordinal"_a, "threads"_a, "cache_dir"_a = "", "warn"_a.none() = nb::none(), nb::keep_alive<1, 3>())
      .def_static("names", &CudaDevice::names,
                  "Return the names of the GPUs here. Raises RuntimeError without a driver.")
      .def_static("architecture_of", &CudaDevice::architecture_of, "ordinal"_a,
                  "Return what kernels of a GPU are compiled for, as sm_90. Raises RuntimeError if it can't be used.")
      .def_prop_ro("name", &CudaDevice::name, "Name of the GPU.")
      .def_prop_ro("architecture", &CudaDevice::architecture, "What kernels are compiled for, as sm_90.")
      .def_prop_ro("cache", &CudaDevice::cache, nb::rv_policy::reference_internal, "The code that the driver has made.")
      .def_prop_ro("num_graph_launches", &CudaDevice::num_graph_launches, "Number of steps that ran as a graph.")
      .def_prop_ro("free_memory", &CudaDevice::free_memory, "Bytes of the GPU's memory that are free.")
      .def_prop_ro("thread_memory", &CudaDevice::thread_memory,
                   "Bytes of its memory that threads of the loaded kernels take at most, beside registers.")
      .def_prop_ro("total_memory", &CudaDevice::total_memory, "Bytes of the GPU's memory.")
      .def("load", &CudaDevice::load, "ptx"_a, "entry"_a, "threads_per_item"_a, "threads_per_block"_a,
           "shared_bytes"_a = 0, nb::call_guard<nb::gil_scoped_release>(),
           "Have the driver compile PTX; return the number by which launches name its function `entry`, whose blocks "
           "have at most as many threads, and as many bytes of shared memory beside what it declares.");
}

}  // namespace quire
