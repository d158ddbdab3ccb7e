#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "compute/jit.h"
#include "compute/thread_pool.h"

namespace nb = nanobind;

namespace quire {

void bind_jit(nb::module_& m) {
  m.def("host_features", &host_features, "CPU features that this host grants, by LLVM's names.");
  m.def("request_amx", &ThreadPool::request_amx, "Asks the kernel for AMX tiles; whether they may be used.");
  m.def("llvm_version", &llvm_version, "Version of the LLVM that compiles kernels.");
  nb::class_<Jit>(m, "Jit", "Compiles MLIR text to functions of this process, with a cache of objects on disk.")
      .def(
          "__init__",
          [](Jit* self, std::string cpu, std::string features, int vector_bits, const std::string& cache_dir) {
            new (self) Jit(Target{std::move(cpu), std::move(features), vector_bits}, cache_dir);
          },
          nb::arg("cpu"), nb::arg("features"), nb::arg("vector_bits"), nb::arg("cache_dir") = "")
      .def("compile", &Jit::compile, nb::arg("source"), nb::arg("symbols"), nb::call_guard<nb::gil_scoped_release>(),
           "Addresses of the symbols, in their order.")
      .def("assembly", &Jit::assembly, nb::arg("source"), "Assembly of the module, for people.")
      .def_prop_ro("compiled", &Jit::compiled)
      .def_prop_ro("cache_hits", &Jit::cache_hits);
}

}  // namespace quire
