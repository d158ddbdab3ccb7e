#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <tuple>
#include <utility>

namespace quire {

/// A member of a bound struct, its keyword argument and its docstring.
template <class T, class Member, class Argument>
struct Field {
  const char* name;
  Member T::* member;
  Argument argument;
  const char* doc;
};

/// A member that the constructor must be given.
template <class T, class Member>
auto field(const char* name, Member T::* member, const char* doc = "") {
  return Field{name, member, nanobind::arg(name), doc};
}

/// A field that is optional in Python, with the default of the struct.
template <class T, class Member>
auto option(const char* name, Member T::* member, const char* doc = "") {
  return Field{name, member, nanobind::arg(name) = T{}.*member, doc};
}

template <class Member>
constexpr bool kIsOptional = false;
template <class Value>
constexpr bool kIsOptional<std::optional<Value>> = true;

/// A member that keeps its value of `T{}` unless the constructor is given another.
template <class T, class Member>
auto option(const char* name, std::optional<Member> T::* member, const char* doc = "") {
  return Field{name, member, nanobind::arg(name).none() = T{}.*member, doc};
}

/// Binds a struct of plain members: a constructor with a keyword for each field, and attributes.
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
  (type.def_rw(fields.name, fields.member, fields.doc), ...);
  return type;
}

}  // namespace quire
