#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "page_pool.h"
#include "sampling_state.h"

namespace quire {

/// A sequence of tokens that the model extends: its tokens, its KV pages and how its next token is drawn.
struct Sequence {
  std::vector<std::int32_t> tokens;
  std::int64_t num_prompt_tokens;
  std::int64_t prompt_logprobs_done;  ///< prompt positions whose logprobs are out; recomputing does not repeat them
  std::vector<std::int32_t> pages;    ///< page i holds positions [i * page_size, (i + 1) * page_size)
  SamplingState sampling;
};

/// The open sequences, by slot: a small number that is handed out again once its sequence is closed.
class Sequences {
 public:
  Sequences(PagePool& pool, std::int32_t page_size, std::int32_t vocab_size);
  ~Sequences();
  Sequences(const Sequences&) = delete;
  Sequences& operator=(const Sequences&) = delete;

  /// Throws std::invalid_argument when tokens or sampling are of no use.
  std::int32_t open(std::vector<std::int32_t> tokens, std::int64_t num_prompt_tokens, SamplingConfig sampling);

  /// Makes the slot's pages cover `num_tokens` positions: all of them, or none and false when the pool lacks pages.
  bool reserve(std::int32_t slot, std::int64_t num_tokens);

  /// Gives back the slot's pages; its tokens stay.
  void release_pages(std::int32_t slot);

  /// Gives back everything. The slot's number may be handed out again.
  void close(std::int32_t slot);

  /// Throws std::out_of_range when no sequence is open in the slot.
  Sequence& at(std::int32_t slot);

  std::int32_t page_size() const { return page_size_; }
  std::int32_t vocab_size() const { return vocab_size_; }

 private:
  PagePool& pool_;
  std::int32_t page_size_;
  std::int32_t vocab_size_;
  std::vector<std::unique_ptr<Sequence>> slots_;
  std::vector<std::int32_t> free_;
};

}  // namespace quire
