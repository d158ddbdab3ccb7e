#include "sampling/vocab_scan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

namespace quire {
namespace {

constexpr int kBlock = VocabScan::kBlock;

struct KeyRange {
  std::int32_t least, most;
};

// The loops below have a fixed count and no branches: compilers turn them into vector code of any width.

KeyRange key_range(const float* logits) {
  std::int32_t least = std::numeric_limits<std::int32_t>::max();
  std::int32_t most = std::numeric_limits<std::int32_t>::min();
  for (int i = 0; i < kBlock; ++i) {
    const std::int32_t key = order_key(logits[i]);
    least = std::min(least, key);
    most = std::max(most, key);
  }
  return {least, most};
}

std::uint64_t mass_of_block(const float* logits, float max, float inverse_temperature) {
  std::uint64_t masses[kBlock];
  masses_of(logits, max, inverse_temperature, masses);
  std::uint64_t mass = 0;
  for (int i = 0; i < kBlock; ++i) mass += masses[i];
  return mass;
}

[[noreturn]] void throw_first_bad(std::span<const float> logits) {
  for (std::size_t i = 0; i < logits.size(); ++i) {
    const std::int32_t key = order_key(logits[i]);
    if (key >= kMostKey || key < kLeastKey) throw_bad_logit(static_cast<std::int64_t>(i), key);
  }
  throw std::runtime_error("logits changed while they were read");
}

}  // namespace

void throw_bad_logit(std::int64_t token, std::int32_t key) {
  throw std::runtime_error("the logit of token " + std::to_string(token) +
                           (key == kMostKey ? " is infinite" : " is NaN") +
                           ": the weights of the model or of an adapter, its number format, a penalty or a bias is out "
                           "of bounds for this input");
}

void throw_all_banned(std::size_t vocab_size) {
  throw std::runtime_error("none of the " + std::to_string(vocab_size) +
                           " tokens may be sampled: allowed_token_ids, bad_words and min_tokens (which bans the stop "
                           "tokens) together ban them all; allow at least one more");
}

/// Calls use(const float*) with kBlock logits; those beyond the vocabulary are -inf.
template <class F>
void VocabScan::with_block(std::size_t block, F&& use) const {
  const std::size_t begin = block * kBlock;
  if (begin + kBlock <= logits_.size()) return use(logits_.data() + begin);
  float padded[kBlock];
  std::fill(padded, padded + kBlock, -std::numeric_limits<float>::infinity());
  std::copy(logits_.begin() + begin, logits_.end(), padded);
  use(static_cast<const float*>(padded));
}

VocabScan::VocabScan(std::span<const float> logits, SamplerScratch& scratch) : logits_(logits), scratch_(scratch) {
  KeyRange all{kLeastKey, kLeastKey};
  scratch.block_max.resize((logits.size() + kBlock - 1) / kBlock);
  for (std::size_t block = 0; block < scratch.block_max.size(); ++block) {
    with_block(block, [&](const float* x) {
      const KeyRange range = key_range(x);
      scratch.block_max[block] = range.most;
      all = {std::min(all.least, range.least), std::max(all.most, range.most)};
    });
  }
  if (all.least < kLeastKey || all.most >= kMostKey) throw_first_bad(logits);
  max_key_ = all.most;
}

float VocabScan::max() const { return key_value(max_key_); }

void VocabScan::ban(std::int32_t token) {
  const std::size_t block = static_cast<std::size_t>(token) / kBlock;
  with_block(block, [&](const float* x) { scratch_.block_max[block] = key_range(x).most; });
}

bool VocabScan::any() const {
  return std::ranges::any_of(scratch_.block_max, [](std::int32_t key) { return key > kLeastKey; });
}

std::uint64_t VocabScan::drop_mass(std::int32_t token, float inverse_temperature) {
  const std::size_t block = static_cast<std::size_t>(token) / kBlock;
  const std::uint64_t before = scratch_.block_mass[block];
  with_block(block, [&](const float* x) { scratch_.block_mass[block] = mass_of_block(x, max(), inverse_temperature); });
  return before - scratch_.block_mass[block];
}

std::int32_t VocabScan::argmax() const {
  const auto block = std::ranges::max_element(scratch_.block_max);
  std::size_t token = static_cast<std::size_t>(block - scratch_.block_max.begin()) * kBlock;
  while (order_key(logits_[token]) != *block) ++token;
  return static_cast<std::int32_t>(token);
}

std::uint64_t VocabScan::weigh(float inverse_temperature) {
  std::uint64_t total = 0;
  scratch_.block_mass.resize(scratch_.block_max.size());
  for (std::size_t block = 0; block < scratch_.block_mass.size(); ++block) {
    with_block(block, [&](const float* x) {
      scratch_.block_mass[block] = mass_of_block(x, max(), inverse_temperature);
      total += scratch_.block_mass[block];
    });
  }
  return total;
}

std::int32_t VocabScan::token_at(std::uint64_t target, float inverse_temperature) const {
  std::size_t block = 0;
  while (target >= scratch_.block_mass[block]) target -= scratch_.block_mass[block++];
  std::int32_t token = static_cast<std::int32_t>(block) * kBlock;
  with_block(block, [&](const float* x) {
    std::uint64_t masses[kBlock];
    masses_of(x, max(), inverse_temperature, masses);
    for (int i = 0; target >= masses[i]; ++i, ++token) target -= masses[i];
  });
  return token;
}

std::int32_t VocabScan::key_reached_by(std::int32_t count) {
  // The count-th largest maximum of a block is reached by one token in each of `count` blocks.
  std::vector<std::int32_t>& maxima = scratch_.block_sort;
  if (static_cast<std::size_t>(count) > scratch_.block_max.size()) return kLeastKey;
  maxima = scratch_.block_max;
  std::nth_element(maxima.begin(), maxima.begin() + (count - 1), maxima.end(), std::greater<>());
  return maxima[count - 1];
}

std::span<Candidate> VocabScan::collect(std::int32_t least) {
  std::vector<Candidate>& found = scratch_.candidates;
  std::size_t size = 0;
  for (std::size_t block = 0; block < scratch_.block_max.size(); ++block) {
    if (scratch_.block_max[block] < least) continue;
    const std::size_t begin = block * kBlock;
    const std::size_t end = std::min(begin + kBlock, logits_.size());
    if (found.size() < size + kBlock) found.resize(std::max(2 * found.size(), size + kBlock));
    for (std::size_t token = begin; token < end; ++token) {  // always written, seldom kept: no branch to mispredict
      const std::int32_t key = order_key(logits_[token]);
      found[size] = {token_key(key, static_cast<std::int32_t>(token)), 0};
      size += key >= least;
    }
  }
  return std::span(found).first(size);
}

std::int32_t VocabScan::rank(std::int32_t token) const {
  const std::int32_t key = order_key(logits_[token]);
  std::int32_t before = 0;
  for (std::int32_t i = 0; i < token; ++i) before += order_key(logits_[i]) >= key;
  for (std::size_t i = token + 1; i < logits_.size(); ++i) before += order_key(logits_[i]) > key;
  return before + 1;
}

}  // namespace quire
