#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "compute/bf16_pairs.h"
#include "jit/jit.h"
#include "jit/ptx.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {

void bind_jit(nb::module_& m) {
  m.def("host_features", &host_features, "Return the CPU features that this host grants, by LLVM's names.");
  m.def(
      "adds_pairs_by_fma",
      [](Address function) {
        const auto products = function == 0 ? host_pair_products() : reinterpret_cast<PairProducts>(function);
        return products != nullptr && adds_by_fma(products);
      },
      "function"_a = 0,
      "Return True if `vdpbf16ps`, or the function at this address, has the bits of FMAs: see compute/bf16_pairs.h.");
  m.def("pair_products_cost", &pair_products_cost,
        "Return the time of a `vdpbf16ps` relative to that of an FMA; 0 if the host has none.");
  m.def("llvm_version", &llvm_version, "Return the version of the LLVM that compiles kernels.");
  nb::class_<ObjectCache>(m, "ObjectCache", "Compiled kernels on disk.")
      .def_prop_ro("compiled", &ObjectCache::compiled, "Number of modules compiled so far.")
      .def_prop_ro("hits", &ObjectCache::hits, "Number of modules read from disk so far.")
      .def_prop_ro("rejected", &ObjectCache::rejected, "Entries that were compiled again, each with the reason.");
  nb::class_<Jit>(m, "Jit", "Compiler of MLIR text to functions of this process, with a cache of objects on disk.")
      .def(
          "__init__",
          [](Jit* self, std::string cpu, std::string features, int vector_bits, const std::string& cache_dir) {
            new (self) Jit(Target{std::move(cpu), std::move(features), vector_bits}, cache_dir);
          },
          "cpu"_a, "features"_a, "vector_bits"_a, "cache_dir"_a = "")
      .def("compile", &Jit::compile, "source"_a, "symbols"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Compile a module and return the addresses of the symbols, in order.")
      .def("assembly", &Jit::assembly, "source"_a, "Return the assembly of a module, for inspection.")
      .def_prop_ro("cache", &Jit::cache, nb::rv_policy::reference_internal);
  nb::class_<PtxCompiler>(m, "PtxCompiler", "Compiler of MLIR text to PTX for a GPU architecture, as sm_90.")
      .def(
          "__init__",
          [](PtxCompiler* self, std::string architecture, const std::string& cache_dir) {
            new (self) PtxCompiler(std::move(architecture), cache_dir);
          },
          "architecture"_a, "cache_dir"_a = "")
      .def("compile", &PtxCompiler::compile, "source"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Return the PTX of a module.")
      .def_prop_ro("cache", &PtxCompiler::cache, nb::rv_policy::reference_internal);
}

}  // namespace quire
