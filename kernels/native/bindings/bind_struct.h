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
Field<T, Member, nanobind::arg> field(const char* name, Member T::* member, const char* doc = "") {
  return {name, member, nanobind::arg(name), doc};
}

template <class Member>
constexpr bool kIsOptional = false;
template <class Value>
constexpr bool kIsOptional<std::optional<Value>> = true;

/// A member that keeps its value of `T{}` unless the constructor is given another.
template <class T, class Member>
auto defaulted(const char* name, Member T::* member, const char* doc = "") {
  const auto bind = [&](auto argument) { return Field<T, Member, decltype(argument)>{name, member, argument, doc}; };
  if constexpr (kIsOptional<Member>)
    return bind(nanobind::arg(name).none() = T{}.*member);
  else
    return bind(nanobind::arg(name) = T{}.*member);
}

enum class Access { kRead, kReadWrite };

/// Binds a struct of plain members: a constructor with a keyword for each field, and attributes.
template <Access access = Access::kRead, class T, class... Member, class... Argument>
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
  const auto bind_attribute = [&]<class M, class A>(const Field<T, M, A>& each) {
    if constexpr (access == Access::kRead)
      type.def_ro(each.name, each.member, each.doc);
    else if constexpr (kIsOptional<M>)
      type.def_rw(each.name, each.member, nanobind::arg().none(), each.doc);
    else
      type.def_rw(each.name, each.member, each.doc);
  };
  (bind_attribute(fields), ...);
  return type;
}

}  // namespace quire
