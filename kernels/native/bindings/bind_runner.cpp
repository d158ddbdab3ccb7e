#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/bindings.h"
#include "compute/integers.h"
#include "compute/packing.h"
#include "compute/runner.h"

namespace nb = nanobind;

namespace quire {
namespace {

using Address = std::uintptr_t;

Dim dim_of(const std::string& name) {
  if (name == "tokens") return Dim::tokens;
  if (name == "logit_rows") return Dim::logit_rows;
  if (name == "capacity") return Dim::capacity;
  if (name == "kv_tiles") return Dim::kv_tiles;
  if (name == "entries") return Dim::entries;
  if (name == "parts") return Dim::parts;
  if (name == "splits") return Dim::splits;
  throw std::invalid_argument("dim '" + name +
                              "' is none of tokens, logit_rows, capacity, kv_tiles, entries, parts, splits");
}

void add_launch(Plan& plan, Address kernel, const std::vector<Address>& buffers, const std::string& dim,
                std::int64_t per, std::int64_t times) {
  Launch launch{reinterpret_cast<Kernel>(kernel), {}, dim_of(dim), per, times};
  for (Address buffer : buffers) launch.buffers.push_back(reinterpret_cast<void*>(buffer));
  plan.add(std::move(launch));
}

using Sizes = std::map<std::string, std::int64_t>;

Dims dims_of(const Sizes& sizes) {
  Dims dims{};
  for (const auto& [name, size] : sizes) dims[static_cast<std::size_t>(dim_of(name))] = size;
  return dims;
}

void run_plan(Plan& plan, ThreadPool& pool, const Sizes& sizes) {
  const Dims dims = dims_of(sizes);
  nb::gil_scoped_release release;
  plan.run(pool, dims);
}

std::vector<double> profile_plan(Plan& plan, ThreadPool& pool, const Sizes& sizes) {
  const Dims dims = dims_of(sizes);
  nb::gil_scoped_release release;
  return plan.profile(pool, dims);
}

Sizes split_attention(Runner& runner, Sizes sizes) {
  Dims dims = dims_of(sizes);
  runner.split_attention(dims);
  for (const char* name : {"entries", "parts", "splits"}) sizes[name] = dims[static_cast<std::size_t>(dim_of(name))];
  return sizes;
}

nb::object logprobs_tuple(std::int32_t token, const TokenLogprobs& entry) {
  std::vector<std::int32_t> ids{token};
  std::vector<float> values{entry.logprob};
  ids.insert(ids.end(), entry.top_ids.begin(), entry.top_ids.end());
  values.insert(values.end(), entry.top_logprobs.begin(), entry.top_logprobs.end());
  return nb::make_tuple(nb::cast(ids), nb::cast(values), entry.rank);
}

nb::object logprobs_of_row(const StepResult& result, std::size_t row) {
  const std::vector<TokenLogprobs>& entries = result.logprobs.at(row);
  if (entries.empty()) return nb::none();
  nb::list list;
  for (std::size_t i = 0; i < entries.size(); i++) list.append(logprobs_tuple(result.token_ids[row][i], entries[i]));
  return list;
}

nb::dict pooled_dict(const StepResult& result) {
  nb::dict dict;
  for (const auto& [index, vector] : result.pooled)
    dict[nb::int_(index)] = nb::bytes(vector.data(), vector.size() * sizeof(float));
  return dict;
}

nb::dict prompt_logprobs_dict(const StepResult& result) {
  nb::dict dict;
  for (const auto& [index, positions] : result.prompt_logprobs) {
    nb::list list;
    for (const Position& position : positions) list.append(logprobs_tuple(position.token, position.logprobs));
    dict[nb::int_(index)] = list;
  }
  return dict;
}

void pack_matrix(Runner& runner, Address target, const std::string& target_format, std::int64_t k_blocks,
                 std::int64_t first_tile, std::int64_t tile_step, Address source, const std::string& source_format,
                 std::int64_t n, std::int64_t k, std::int64_t n_stride, std::int64_t k_stride) {
  nb::gil_scoped_release release;
  pack(runner.threads(), {reinterpret_cast<const void*>(source), format_of(source_format), n, k, n_stride, k_stride},
       {reinterpret_cast<void*>(target), format_of(target_format), k_blocks}, first_tile, tile_step);
}

PackedIntegers packed_integers(Address target, int bits, std::int64_t group, bool zeros, std::int64_t k) {
  if ((bits != 4 && bits != 8) || group < 0 || group % 32)
    throw std::invalid_argument("integers of " + std::to_string(bits) + " bits in groups of " + std::to_string(group) +
                                " can't be packed");
  return {reinterpret_cast<std::byte*>(target), {bits, group, zeros}, k};
}

void quantize_matrix(Runner& runner, Address target, int bits, std::int64_t group, std::int64_t first_tile,
                     std::int64_t tile_step, Address source, const std::string& source_format, std::int64_t n,
                     std::int64_t k, std::int64_t n_stride, std::int64_t k_stride) {
  nb::gil_scoped_release release;
  quantize(runner.threads(),
           {reinterpret_cast<const void*>(source), format_of(source_format), n, k, n_stride, k_stride},
           packed_integers(target, bits, group, false, k), first_tile, tile_step);
}

template <class T>
using Array = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void pack_integer_matrix(Runner& runner, Address target, int bits, std::int64_t group, std::int64_t first_tile,
                         std::int64_t tile_step, Array<std::uint8_t> values, Array<float> scales,
                         std::optional<Array<std::int16_t>> zeros) {
  const auto n = static_cast<std::int64_t>(values.shape(0)), k = static_cast<std::int64_t>(values.shape(1));
  const PackedIntegers packed = packed_integers(target, bits, group, zeros.has_value(), k);
  const auto groups = static_cast<std::size_t>(packed.format.groups(k));
  if (scales.shape(0) != values.shape(0) || scales.shape(1) != groups ||
      (zeros && (zeros->shape(0) != scales.shape(0) || zeros->shape(1) != groups)))
    throw std::invalid_argument("scales and zeros must have a row for each column of the matrix, and " +
                                std::to_string(groups) + " groups");
  nb::gil_scoped_release release;
  pack_integers(runner.threads(), {values.data(), scales.data(), zeros ? zeros->data() : nullptr, n, k}, packed,
                first_tile, tile_step);
}

void bind_memory(nb::class_<Runner>& runner) {
  runner
      .def(
          "allocate", [](Runner& r, std::size_t bytes) { return reinterpret_cast<Address>(r.arena().allocate(bytes)); },
          nb::arg("num_bytes"), "Address of zeroed memory that lives as long as the runner.")
      .def(
          "allocate_by_node",
          [](Runner& r, std::size_t bytes) {
            nb::gil_scoped_release release;
            return reinterpret_cast<Address>(r.allocate_by_node(bytes));
          },
          nb::arg("num_bytes"), "The same for a matrix, near the threads that will read it.")
      .def(
          "upload",
          [](Runner& r, nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> array) {
            void* target = r.arena().allocate(array.nbytes());
            std::memcpy(target, array.data(), array.nbytes());
            return reinterpret_cast<Address>(target);
          },
          nb::arg("array"), "Address of a copy of the array.")
      .def(
          "kv_layer", [](Runner& r, std::int64_t layer) { return reinterpret_cast<Address>(r.kv().layer(layer)); },
          nb::arg("layer"), "Address of a layer's KV tiles.")
      .def("pack", &pack_matrix, nb::arg("target"), nb::arg("target_format"), nb::arg("k_blocks"),
           nb::arg("first_tile"), nb::arg("tile_step"), nb::arg("source"), nb::arg("source_format"), nb::arg("n"),
           nb::arg("k"), nb::arg("n_stride"), nb::arg("k_stride"))
      .def("quantize", &quantize_matrix, nb::arg("target"), nb::arg("bits"), nb::arg("group"), nb::arg("first_tile"),
           nb::arg("tile_step"), nb::arg("source"), nb::arg("source_format"), nb::arg("n"), nb::arg("k"),
           nb::arg("n_stride"), nb::arg("k_stride"))
      .def("pack_integers", &pack_integer_matrix, nb::arg("target"), nb::arg("bits"), nb::arg("group"),
           nb::arg("first_tile"), nb::arg("tile_step"), nb::arg("values"), nb::arg("scales"), nb::arg("zeros").none())
      .def("split_attention", &split_attention, nb::arg("dims"),
           "Moves entries of attention that the inputs hold to parts and splits, as a step does; the dims then.")
      .def_prop_ro("inputs", [](Runner& r) {
        const StepInputs& in = r.inputs();
        auto address = [](const auto* pointer) { return reinterpret_cast<Address>(pointer); };
        return std::map<std::string, Address>{
            {"token_ids", address(in.token_ids)},   {"positions", address(in.positions)},
            {"kv_slots", address(in.kv_slots)},     {"entries", address(in.entries)},
            {"parts", address(in.parts)},           {"splits", address(in.splits)},
            {"logit_rows", address(in.logit_rows)}, {"logits", address(in.logits)},
            {"states", address(in.states)}};
      });
}

}  // namespace

void bind_runner(nb::module_& m) {
  m.attr("HUGE_PAGE") = kHugePage;
  m.attr("BLOCK_TOKENS") = kBlockTokens;
  m.attr("MOST_PARTS") = kMostParts;
  nb::class_<StepResult>(m, "StepResult", "The outcome of a step, by index in the batch.")
      .def_ro("token_ids", &StepResult::token_ids,
              "The span of each sequence: the tokens that the step appended to it, forced ones included.")
      .def_ro("pending", &StepResult::pending, "Rows whose samples are deferred: `Runner.collect` adds them.")
      .def("logprobs", &logprobs_of_row, nb::arg("row"),
           "An entry for each token of a span; None if the sequence did not ask for log probabilities.")
      .def_prop_ro("prompt_logprobs", &prompt_logprobs_dict)
      .def_prop_ro("pooled", &pooled_dict, "Vectors of f32, as the bytes that they have in memory.")
      .def_ro("errors", &StepResult::errors);
  nb::class_<Plan>(m, "Plan", "A list of kernel launches.")
      .def(nb::init<>())
      .def("add", &add_launch, nb::arg("kernel"), nb::arg("buffers"), nb::arg("dim"), nb::arg("per") = 1,
           nb::arg("times") = 1)
      .def("run", &run_plan, nb::arg("pool"), nb::arg("dims"), "Runs the launches with these dims, by name.")
      .def("profile", &profile_plan, nb::arg("pool"), nb::arg("dims"), "The same; returns the seconds of each.");
  nb::class_<Runner> runner(m, "Runner", "Runs a model: owns its memory, threads, pages, sequences and plan.");
  runner
      .def(
          "__init__",
          [](Runner* self, std::int32_t threads, bool pin, std::int32_t num_pages, std::int32_t page_size,
             std::int32_t vocab_size, std::int64_t kv_heads, std::int64_t capacity, std::int64_t logit_capacity,
             std::int64_t logit_stride, std::int64_t hidden_size, std::int64_t tokens_per_entry, std::int64_t layers,
             std::int64_t tile_bytes, std::int64_t value_offset) {
            new (self) Runner({threads, pin, num_pages, page_size, vocab_size, kv_heads, capacity, logit_capacity,
                               logit_stride, hidden_size, tokens_per_entry, layers, tile_bytes, value_offset});
          },
          nb::kw_only(), nb::arg("threads"), nb::arg("pin") = false, nb::arg("num_pages"), nb::arg("page_size"),
          nb::arg("vocab_size"), nb::arg("kv_heads"), nb::arg("capacity"), nb::arg("logit_capacity"),
          nb::arg("logit_stride"), nb::arg("hidden_size"), nb::arg("tokens_per_entry"), nb::arg("layers"),
          nb::arg("tile_bytes"), nb::arg("value_offset"))
      .def_prop_ro("body", &Runner::body, nb::rv_policy::reference_internal)
      .def_prop_ro("head", &Runner::head, nb::rv_policy::reference_internal)
      .def_prop_ro("states", &Runner::states, nb::rv_policy::reference_internal)
      .def_prop_ro("threads", [](Runner& r) { return r.threads().size(); })
      .def_prop_ro("pinned", [](Runner& r) { return r.threads().pinned(); })
      .def_prop_ro("num_prepared_pages", [](Runner& r) { return r.kv().num_prepared(); })
      .def_prop_ro("sequences", &Runner::sequences, nb::rv_policy::reference_internal)
      .def(
          "step",
          [](Runner& r, const std::vector<std::int32_t>& slots, const std::vector<std::int64_t>& starts,
             const std::vector<std::int64_t>& counts, const std::optional<std::vector<std::int64_t>>& num_drafts) {
            nb::gil_scoped_release release;
            return r.step(slots, starts, counts, num_drafts ? std::span(*num_drafts) : std::span<const std::int64_t>());
          },
          nb::arg("slots"), nb::arg("starts"), nb::arg("counts"), nb::arg("num_drafts").none() = nb::none(),
          "Compute tokens [start, start + count) of each slot, and sample where a chunk reaches the sequence's end. "
          "The last num_drafts tokens of a sequence are drafts, which are kept as far as they are what is sampled.")
      .def("collect", &Runner::collect, nb::arg("result"), nb::call_guard<nb::gil_scoped_release>(),
           "Add pending spans to the result of the last step, waiting for one at least; return their rows, or none "
           "when none is pending.")
      .def("fork", &Runner::fork, nb::arg("slot"), nb::arg("source"), nb::arg("num_computed"), nb::arg("num_tokens"),
           "Give a slot without pages the first computed positions of another; return False if there are too few "
           "pages.");
  bind_memory(runner);
}

}  // namespace quire
