#pragma once

#include <nanobind/nanobind.h>

#include <tuple>
#include <utility>

namespace quire {

/// A member of a bound struct, and its keyword argument.
template <class T, class Member, class Argument>
struct Field {
  const char* name;
  Member T::* member;
  Argument argument;
};

template <class T, class Member>
Field<T, Member, nanobind::arg> field(const char* name, Member T::* member) {
  return {name, member, nanobind::arg(name)};
}

template <class T, class Member>
Field<T, Member, nanobind::arg_v> field(const char* name, Member T::* member, const Member& fallback) {
  return {name, member, nanobind::arg(name) = fallback};
}

/// Binds a struct of plain members: a constructor with a keyword for each field, and attributes to read.
template <class T, class... Member, class... Argument>
nanobind::class_<T> bind_struct(nanobind::module_& m, const char* name, const char* doc,
                                const Field<T, Member, Argument>&... fields) {
  nanobind::class_<T> type(m, name, doc);
  type.def(
      "__init__",
      [members = std::tuple(fields.member...)](T* self, Member... values) {
        new (self) T{};
        std::apply([&](auto... member) { ((self->*member = std::move(values)), ...); }, members);
      },
      nanobind::kw_only(), fields.argument...);
  (type.def_ro(fields.name, fields.member), ...);
  return type;
}

}  // namespace quire
