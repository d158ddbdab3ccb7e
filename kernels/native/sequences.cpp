#include "sequences.h"

#include <stdexcept>
#include <utility>

namespace quire {

Sequences::Sequences(PagePool& pool, std::int32_t page_size, std::int32_t vocab_size)
    : pool_(pool), page_size_(page_size), vocab_size_(vocab_size) {}

Sequences::~Sequences() {
  for (std::size_t slot = 0; slot < slots_.size(); slot++)
    if (slots_[slot]) close(static_cast<std::int32_t>(slot));
}

std::int32_t Sequences::open(std::vector<std::int32_t> tokens, std::int64_t num_prompt_tokens,
                             SamplingConfig sampling) {
  if (tokens.empty()) throw std::invalid_argument("a sequence needs at least one token");
  for (std::int32_t token : tokens)
    if (token < 0 || token >= vocab_size_)
      throw std::invalid_argument("token id " + std::to_string(token) + " is not in [0, " +
                                  std::to_string(vocab_size_) + ")");
  SamplingState state(std::move(sampling), tokens, num_prompt_tokens, vocab_size_);
  auto sequence = std::make_unique<Sequence>(Sequence{std::move(tokens), num_prompt_tokens, 1, {}, std::move(state)});
  if (free_.empty()) {
    slots_.push_back(std::move(sequence));
    return static_cast<std::int32_t>(slots_.size() - 1);
  }
  const std::int32_t slot = free_.back();
  free_.pop_back();
  slots_[slot] = std::move(sequence);
  return slot;
}

bool Sequences::reserve(std::int32_t slot, std::int64_t num_tokens) {
  Sequence& sequence = at(slot);
  const std::int64_t needed = (num_tokens + page_size_ - 1) / page_size_;
  const std::int64_t missing = needed - static_cast<std::int64_t>(sequence.pages.size());
  return missing <= 0 ||
         (missing <= pool_.total() && pool_.allocate(static_cast<std::int32_t>(missing), sequence.pages));
}

void Sequences::release_pages(std::int32_t slot) {
  Sequence& sequence = at(slot);
  for (std::int32_t page : sequence.pages) pool_.release(page);
  sequence.pages.clear();
}

void Sequences::close(std::int32_t slot) {
  release_pages(slot);
  slots_[slot].reset();
  free_.push_back(slot);
}

Sequence& Sequences::at(std::int32_t slot) {
  if (slot < 0 || static_cast<std::size_t>(slot) >= slots_.size() || !slots_[slot])
    throw std::out_of_range("no sequence is open in slot " + std::to_string(slot));
  return *slots_[slot];
}

}  // namespace quire
