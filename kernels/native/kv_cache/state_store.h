#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "compute/arena.h"
#include "compute/device.h"

namespace quire {

/// The state that a model's layers keep in place of keys and values: the inputs of convolutions, the matrices of linear
/// attention.
struct StateShape {
  std::int64_t record_bytes = 0;  ///< bytes of all layers' state; 0: the model has no state
  std::int32_t num_records = 0;   ///< records in all: one for each sequence that has pages at the same time, at least 2
  std::int32_t snapshot_pages = 0;  ///< length of a long prompt's first snapshot; 0: only its end has one
  std::int64_t piece_bytes = 0;     ///< bytes of the pieces in which records are copied; 0: they are not

  /// Returns the memory that the records take. Throws std::invalid_argument for sizes that are too small or too large.
  std::int64_t bytes() const;

  /// Returns the number of pieces of a record; the last one may have fewer bytes. 0: there are none.
  std::int32_t num_pieces() const;

  /// Returns the bytes from the first record to another one; a negative number for StateStore::kNone.
  std::int64_t offset(std::int32_t record) const;
};

/// Memory of records, from `base` on, and the device that it belongs to, both of which outlive the records.
struct StateMemory {
  std::byte* base = nullptr;
  const Device* device = nullptr;
};

class StateLedger;

/// Records of state. Each is that of all layers after a number of tokens, and is written as a whole: unlike pages,
/// records of prefixes share nothing. Not thread-safe: the step loop owns it.
///
/// A record is free, held by sequences, or cached: the snapshot of a page in the prefix cache, at whose end it is the
/// state, that no sequence holds. Cached ones are in the order of their last use. A page that leaves the prefix cache
/// loses its snapshot; one that loses its snapshot stays.
///
/// Invariant: free_records() + cached_records() + held_records() == total().
class StateStore {
 public:
  static constexpr std::int32_t kNone = -1;

  /// The records lie in `memory`, or by default in the store's own. The ledger, if there is one, must outlive the
  /// store. Throws std::invalid_argument and OutOfMemory.
  StateStore(const StateShape& shape, std::int32_t num_pages, StateLedger* ledger = nullptr,
             const StateMemory& memory = {});
  StateStore(const StateStore&) = delete;
  StateStore& operator=(const StateStore&) = delete;

  /// Begins with the snapshots of the ledger, once the prefix cache has their pages.
  void take_over();

  /// Returns a record that one sequence holds, a free one or else that of the least recently used snapshot; kNone if
  /// sequences hold all.
  std::int32_t acquire();
  void retain(std::int32_t record);   ///< holds a snapshot for one more sequence
  void release(std::int32_t record);  ///< gives a record back for one of its sequences

  /// Makes a record that one sequence holds the snapshot of a page, and releases it. Returns false if the page had one.
  /// `is_logged`: it is to be copied elsewhere.
  bool attach(std::int32_t record, std::int32_t page, bool is_logged);

  /// Lets a snapshot be copied elsewhere.
  void log(std::int32_t record);

  /// Takes a page's snapshot from it, if it has one.
  void detach(std::int32_t page);

  /// Returns the snapshot of a page, or kNone. Throws std::out_of_range if the page does not exist.
  std::int32_t snapshot(std::int32_t page) const { return snapshots_.at(static_cast<std::size_t>(page)); }
  bool is_held(std::int32_t record) const { return at(record).holders > 0; }

  /// Returns the bytes of a record. Throws std::out_of_range if it does not exist.
  std::span<std::byte> record(std::int32_t record) const;
  void copy(std::int32_t from, std::int32_t to);

  /// Returns a piece of a record, number `piece` of all pieces of all records. Throws std::out_of_range.
  std::span<std::byte> piece(std::int32_t piece) const;

  std::byte* memory() const { return memory_.base; }  ///< the first record
  bool in_host_memory() const { return memory_.device == nullptr || memory_.device->in_host_memory(); }

  const StateShape& shape() const { return shape_; }
  std::int32_t total() const { return shape_.num_records; }
  std::int32_t free_records() const { return static_cast<std::int32_t>(free_.size()); }
  std::int32_t cached_records() const { return static_cast<std::int32_t>(cached_.size()); }
  std::int32_t held_records() const { return static_cast<std::int32_t>(held_.size()); }
  std::int64_t num_evicted() const { return num_evicted_; }  ///< snapshots that gave way to other states

 private:
  using List = std::list<std::int32_t>;
  struct Record {
    std::int32_t holders = 0;   ///< number of sequences that hold it
    std::int32_t page = kNone;  ///< page whose snapshot it is
    List::iterator place;       ///< its place in one of the lists
  };

  const Record& at(std::int32_t record) const { return records_[static_cast<std::size_t>(record)]; }
  Record& at(std::int32_t record) { return records_[static_cast<std::size_t>(record)]; }

  StateShape shape_;
  StateLedger* ledger_;
  Arena arena_;
  StateMemory memory_;
  std::vector<Record> records_;
  std::vector<std::int32_t> snapshots_;  ///< snapshot of each page, or kNone
  List free_, cached_, held_;            ///< `cached_` begins with the least recently used record
  std::int64_t num_evicted_ = 0;
};

}  // namespace quire
