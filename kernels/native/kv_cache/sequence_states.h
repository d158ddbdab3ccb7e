#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv_cache/state_store.h"

namespace quire {

/// A record, and the number of tokens after which it is the state.
struct StateAt {
  std::int64_t length;
  std::int32_t record;
};

/// The states of a row of a step: where the one before its tokens is, and where those after some of them are written,
/// in ascending order. Two may have the same length. One of them may be written to the record that is read, once it is.
struct StatePath {
  std::int32_t from;                ///< record that is read; kNone: all zeros, before a sequence's first token
  std::span<const StateAt> writes;  ///< states that are written; valid until the step ends
};

/// The state of one sequence: after how many of its tokens it is there, in which record, and where it leaves snapshots.
/// The sequence has a record of its own from `reserve` on, in which steps rewrite it. Until its first step has ended
/// the state may be in a snapshot, which stays held.
///
/// A sequence that shares pages leaves snapshots at page boundaries:
/// - the last one before the prompt's last token: the same prompt begins there, and so do longer ones;
/// - where the prefix cache had pages, but no snapshot: prompts part there;
/// - at `snapshot_pages` pages and each double of that: a long prompt leaves few, and yet another one finds at least
///   half of what it shares with it;
/// - where a step ends, of which only the latest stays: for what follows a preemption or an answer.
class SequenceStates {
 public:
  static constexpr std::int32_t kNone = StateStore::kNone;
  static constexpr std::int64_t kLost = -1;

  /// `shares_pages`: it leaves snapshots. The store must outlive it.
  SequenceStates(StateStore& store, std::int32_t block_size, std::int64_t num_prompt_tokens, bool shares_pages);
  ~SequenceStates() { clear(); }
  SequenceStates(const SequenceStates&) = delete;
  SequenceStates& operator=(const SequenceStates&) = delete;

  /// Number of tokens after which the state is; kLost once a step rewrites it, until that ends.
  std::int64_t length() const { return length_; }

  bool is_writing() const { return !written_.empty(); }  ///< true in a step, until it ends

  /// Begins with the snapshot after so many tokens, or kNone after none.
  void begin(std::int64_t length, std::int32_t snapshot);

  /// Sets the page boundary at which the prefix cache had no more pages.
  void set_branch(std::int64_t length) { branch_ = length; }

  /// Begins with the state of another sequence, which has one. Both have a record of their own.
  void copy(const SequenceStates& other);

  /// Returns the record in which the state is, or is to be: its own one, or else the snapshot that it holds.
  std::int32_t record() const { return own_ != kNone ? own_ : from_; }

  /// Notes that its own record has been filled with the state after `length` tokens. Throws std::logic_error without
  /// such a record.
  void fill(std::int64_t length);

  /// Makes its own record the snapshot of a page, and has no state any more.
  void leave(std::int32_t page);

  /// Makes sure that the state after `num_tokens` tokens can be written. Returns false, and changes nothing, if
  /// sequences hold all records.
  bool reserve(std::int64_t num_tokens);

  /// Begins a step that computes tokens [start, end). Those from number `certain` on may be taken back, such as drafts,
  /// so the states after each of them are written, and that after the ones before is kept, as far as there are records.
  /// Throws std::invalid_argument unless start <= certain <= end, start < end and the state is that after `start`
  /// tokens, and std::logic_error without a record of its own.
  StatePath write(std::int64_t start, std::int64_t end, std::int64_t certain);

  /// Ends the step, of whose tokens those before `num_computed` stay. Returns the number of tokens after which the
  /// state is: that, or fewer where records were short; the others are to be computed again.
  std::int64_t end(std::int64_t num_computed);

  /// Makes what the step has written at page boundaries the snapshots of these pages, the sequence's first ones, which
  /// are in the prefix cache. Gives back what is left.
  void take_snapshots(std::span<const std::int32_t> pages);

  /// Ends a step that has failed, or that has begun for nothing.
  void cancel();

  /// Takes over what another sequence, in whose place this one goes on, has left behind; it gets what this one has.
  void succeed(SequenceStates& other);

  /// Gives back all records; the latest snapshot where a step ended is copied elsewhere, for the next turn of a chat.
  /// The state is that after no token.
  void clear();

 private:
  bool leaves_snapshot(std::int64_t length) const;
  void give_back(std::int32_t record);
  void replace_tail(std::int32_t page, std::int32_t record);

  StateStore& store_;
  std::int64_t block_size_;
  bool shares_pages_;
  std::int64_t prompt_end_;  ///< last page boundary before the prompt's last token
  std::int64_t branch_ = 0;
  std::int64_t length_ = 0;
  bool lacks_snapshot_ = false;   ///< drafts were taken back up to the page boundary at which `own_` is the state
  std::int32_t own_ = kNone;      ///< its own record; kNone while a step rewrites it
  std::int32_t from_ = kNone;     ///< the snapshot that holds the state, if it is not in `own_`
  std::vector<StateAt> written_;  ///< states that the step writes, in ascending order
  std::int32_t tail_page_ = kNone, tail_record_ = kNone;  ///< page and record of the latest snapshot where a step ended
};

}  // namespace quire
