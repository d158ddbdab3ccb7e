#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "compute/device.h"
#include "kv_cache/kv_file.h"
#include "kv_cache/kv_memory.h"
#include "kv_cache/page_ledger.h"
#include "kv_cache/sealed_pages.h"
#include "kv_cache/sequences.h"
#include "kv_cache/state_ledger.h"

namespace quire {

struct KvConfig {
  KvMemory::Shape shape;
  std::int32_t block_size;  ///< tokens of a page, as sequences count them
  std::int32_t vocab_size;
  StateShape state;

  /// The file of KV memory that outlives the process (KvFile), and the name of all that the bits of its KV depend on
  /// besides tokens. Without a file, or with a device that maps none, KV memory ends with its owner.
  std::optional<std::int32_t> fd;
  std::string model;
  std::int32_t sealed_queues;  ///< queues of the sealed pages of the file, each for a thread that copies them elsewhere
};

/// KV memory, the pages that it is divided into, and the sequences that have them.
struct KvCache {
  /// Maps the memory, and takes over the pages of an earlier process if it lies in a file. Throws
  /// std::invalid_argument where that is impossible.
  KvCache(const KvConfig& config, Device& device);

  /// Has memory touched at the pace at which pages are taken. An extent is committed (PagePool) whenever half an extent
  /// of pages has been taken; it is to be ready when half of these have.
  void prefault();

  /// Calls Sequences::fork and copies the page in which the two sequences diverge: both write to it next, so there is
  /// nothing to gain from copying later.
  bool fork(std::int32_t slot, std::int32_t source, std::int64_t num_computed, std::int64_t num_tokens);

  /// Copies a page, or a piece of a record of state: their numbers follow those of the pages, and a piece takes the
  /// beginning of `copy`. Returns the checksum of the copy; whether it has changed meanwhile its seal tells (Seals).
  /// Throws std::invalid_argument for a page or a size that cannot be, and std::out_of_range for such a piece.
  std::uint64_t copy_page(std::int32_t page, std::span<std::byte> copy) const;

  /// Fills one that nobody else uses with a copy of one. Returns its checksum.
  std::uint64_t fill_page(std::int32_t page, std::span<const std::byte> copy);

  /// Seals what has come to the prefix cache, where its memory outlives this process.
  void seal();

  /// Attention multiplies all 32 values of a tile, those not written yet by 0. The page's previous owner may have left
  /// NaN there, so this clears the values of a tile that [start, end) begins and does not fill.
  void clear_values(const Sequence& sequence, std::int64_t start, std::int64_t end);

  std::unique_ptr<KvFile> file;
  KvMemory memory;
  std::unique_ptr<SealedPages> sealed_pages;  ///< nullptr without queues
  std::unique_ptr<PageLedger> ledger;         ///< nullptr without a file
  StateMemory states;
  std::unique_ptr<StateLedger> state_ledger;  ///< nullptr without a file, and for a model without state
  Sequences sequences;
};

}  // namespace quire
