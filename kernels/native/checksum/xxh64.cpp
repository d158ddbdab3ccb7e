#include "checksum/xxh64.h"

#include <array>
#include <bit>
#include <cstring>

namespace quire {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                        kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;
constexpr std::size_t kStripe = 32;  // bytes, a quarter for each accumulator

static_assert(std::endian::native == std::endian::little);

template <class T>
T load(const std::byte* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

std::uint64_t round(std::uint64_t accumulator, std::uint64_t lane) {
  return std::rotl(accumulator + lane * kPrime2, 31) * kPrime1;
}

std::uint64_t merge(std::uint64_t hash, std::uint64_t accumulator) {
  return (hash ^ round(0, accumulator)) * kPrime1 + kPrime4;
}

/// Hashes whole stripes.
std::uint64_t hash_stripes(std::span<const std::byte> stripes, std::uint64_t seed) {
  std::array<std::uint64_t, 4> accumulators{seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
  for (const std::byte *at = stripes.data(), *end = at + stripes.size(); at != end; at += kStripe)
    for (std::size_t i = 0; i < 4; i++) accumulators[i] = round(accumulators[i], load<std::uint64_t>(at + 8 * i));
  std::uint64_t hash = std::rotl(accumulators[0], 1) + std::rotl(accumulators[1], 7) + std::rotl(accumulators[2], 12) +
                       std::rotl(accumulators[3], 18);
  for (const std::uint64_t accumulator : accumulators) hash = merge(hash, accumulator);
  return hash;
}

/// Adds the bytes after the last stripe.
std::uint64_t add_tail(std::uint64_t hash, std::span<const std::byte> tail) {
  for (; tail.size() >= 8; tail = tail.subspan(8))
    hash = std::rotl(hash ^ round(0, load<std::uint64_t>(tail.data())), 27) * kPrime1 + kPrime4;
  if (tail.size() >= 4) {
    hash = std::rotl(hash ^ load<std::uint32_t>(tail.data()) * kPrime1, 23) * kPrime2 + kPrime3;
    tail = tail.subspan(4);
  }
  for (const std::byte byte : tail)
    hash = std::rotl(hash ^ std::to_integer<std::uint64_t>(byte) * kPrime5, 11) * kPrime1;
  return hash;
}

}  // namespace

std::uint64_t xxh64(std::span<const std::byte> bytes, std::uint64_t seed) {
  const std::size_t striped = bytes.size() / kStripe * kStripe;
  std::uint64_t hash = striped == 0 ? seed + kPrime5 : hash_stripes(bytes.first(striped), seed);
  hash = add_tail(hash + bytes.size(), bytes.subspan(striped));
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

}  // namespace quire
