#pragma once

#include <nanobind/nanobind.h>

namespace quire {

void bind_grammar(nanobind::module_& m);
void bind_jit(nanobind::module_& m);
void bind_sequences(nanobind::module_& m);
void bind_support(nanobind::module_& m);
void bind_runner(nanobind::module_& m);

}  // namespace quire
