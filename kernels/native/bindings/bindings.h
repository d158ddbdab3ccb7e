#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "compute/abi.h"
#include "kv_cache/prefix_key.h"

namespace quire {

class Device;
class Runner;

/// Memory as Python passes it to kernels.
using Address = std::uintptr_t;

/// Sizes of a step by name.
using Sizes = std::map<std::string, std::int64_t>;

Dim dim_of(std::string_view name);
Dims dims_of(const Sizes& sizes);

inline nanobind::bytes bytes_of(const PrefixKey& key) { return nanobind::bytes(key.data(), key.size()); }

void bind_abi(nanobind::module_& m);
void bind_checked_file(nanobind::class_<Device>& device);
void bind_checksum(nanobind::module_& m);
void bind_device(nanobind::module_& m);
void bind_grammar(nanobind::module_& m);
void bind_jit(nanobind::module_& m);
void bind_kv_pages(nanobind::module_& m, nanobind::class_<Runner>& runner);
void bind_prefix_watch(nanobind::module_& m);
void bind_runner(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_sequences(nanobind::module_& m);
void bind_speculation(nanobind::module_& m);
void bind_states(nanobind::module_& m);
void bind_threads(nanobind::module_& m);
void bind_weights(nanobind::module_& m);
void bind_packing(nanobind::class_<Device>& device);

}  // namespace quire
