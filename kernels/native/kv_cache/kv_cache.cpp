#include "kv_cache/kv_cache.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "checksum/checksum.h"
#include "kv_cache/page_io.h"

namespace quire {
namespace {

std::unique_ptr<KvFile> open_file(const KvConfig& config, const Device& device) {
  if (!config.fd) return nullptr;
  const std::size_t tile_bytes = KvMemory::bytes(config.shape);
  const auto state_bytes = static_cast<std::size_t>(config.state.bytes());
  const auto contents = device.in_host_memory() ? KvFile::Contents{tile_bytes, state_bytes} : KvFile::Contents{};
  const std::int32_t num_records = config.state.record_bytes == 0 ? 0 : config.state.num_records;
  return std::make_unique<KvFile>(*config.fd, config.shape.num_pages, config.block_size, num_records, contents);
}

std::byte* open_tiles(const KvFile* file, Device& device, const KvMemory::Shape& shape) {
  return file != nullptr && device.in_host_memory() ? file->tiles() : device.allocate(KvMemory::bytes(shape));
}

StateMemory open_state_memory(const KvFile* file, Device& device, const StateShape& shape) {
  if (shape.record_bytes == 0) return {};
  if (file != nullptr && device.in_host_memory()) return {file->states(), &device};
  return {device.allocate(static_cast<std::size_t>(shape.bytes())), &device};
}

std::unique_ptr<SealedPages> open_log(const KvConfig& config) {
  if (config.sealed_queues <= 0) return nullptr;
  if (!config.fd) throw std::invalid_argument("sealed_queues need the file of kv_memory_fd");
  const StateShape& state = config.state;
  const auto capacity = static_cast<std::size_t>(config.shape.num_pages + state.num_records * state.num_pieces());
  return std::make_unique<SealedPages>(static_cast<std::size_t>(config.sealed_queues), capacity);
}

std::unique_ptr<PageLedger> open_ledger(KvFile* file, const KvMemory& memory, const std::string& model,
                                        SealedPages* log) {
  return file == nullptr ? nullptr : std::make_unique<PageLedger>(*file, memory, model_key(model), log);
}

void check_copy(std::size_t given, std::size_t page_bytes) {
  if (given != page_bytes)
    throw std::invalid_argument("a copy of " + std::to_string(given) + " bytes of a piece of state; it must have " +
                                std::to_string(page_bytes) + " as that of a page");
}

std::unique_ptr<StateLedger> open_states(KvFile* file, const PageLedger* pages, const StateMemory& memory,
                                         const StateShape& shape, SealedPages* log) {
  if (file == nullptr || shape.record_bytes == 0) return nullptr;
  if (shape.piece_bytes == 0) throw std::invalid_argument("states in a file need piece_bytes; give those of a page");
  return std::make_unique<StateLedger>(*file, *pages, memory, shape, log);
}

}  // namespace

KvCache::KvCache(const KvConfig& config, Device& device)
    : file(open_file(config, device)),
      memory(open_tiles(file.get(), device, config.shape), device, config.shape),
      sealed_pages(open_log(config)),
      ledger(open_ledger(file.get(), memory, config.model, sealed_pages.get())),
      states(open_state_memory(file.get(), device, config.state)),
      state_ledger(open_states(file.get(), ledger.get(), states, config.state, sealed_pages.get())),
      sequences(config.shape.num_pages, config.block_size, config.vocab_size, memory.extent(), ledger.get(),
                config.state, state_ledger.get(), states) {
  prefault();  // maps what is resident in a file
}

std::uint64_t KvCache::copy_page(std::int32_t page, std::span<std::byte> copy) const {
  const std::int32_t num_pages = memory.shape().num_pages;
  if (page < num_pages || sequences.states() == nullptr) return quire::copy_page(memory, page, copy);
  const std::span<std::byte> piece = sequences.states()->piece(page - num_pages);
  check_copy(copy.size(), memory.page_bytes());
  memory.device().read(copy.first(piece.size()), piece.data());
  std::ranges::fill(copy.subspan(piece.size()), std::byte{0});
  return checksum(copy.first(piece.size()));
}

std::uint64_t KvCache::fill_page(std::int32_t page, std::span<const std::byte> copy) {
  const std::int32_t num_pages = memory.shape().num_pages;
  if (page < num_pages || sequences.states() == nullptr) return quire::fill_page(memory, page, copy);
  const std::span<std::byte> piece = sequences.states()->piece(page - num_pages);
  check_copy(copy.size(), memory.page_bytes());
  memory.device().write(piece.data(), copy.first(piece.size()));
  return checksum(copy.first(piece.size()));
}

void KvCache::seal() {
  if (ledger) ledger->seal();
  if (state_ledger) state_ledger->seal();
}

void KvCache::prefault() {
  const std::int64_t committed = sequences.pages().committed(), held = sequences.pages().held_pages();
  const std::int64_t extent = memory.extent(), last = (committed - extent) / 2;  // held when `committed` grew
  memory.prefault(committed, committed + std::clamp<std::int64_t>(4 * (held - last), 0, extent));
}

bool KvCache::fork(std::int32_t slot, std::int32_t source, std::int64_t num_computed, std::int64_t num_tokens) {
  if (!sequences.fork(slot, source, num_computed, num_tokens)) return false;
  const auto place = static_cast<std::size_t>(num_computed / memory.shape().block_size);
  const std::int64_t tiles = (num_computed % memory.shape().block_size + kTileTokens - 1) / kTileTokens;
  if (tiles == 0) return true;
  memory.copy_tiles(sequences.at(source).pages[place], sequences.at(slot).pages[place], tiles);
  return true;
}

void KvCache::clear_values(const Sequence& sequence, std::int64_t start, std::int64_t end) {
  const std::int64_t first = end / kTileTokens * kTileTokens;
  if (first == end || first < start) return;
  const std::int64_t page = sequence.pages[first / memory.shape().block_size];
  const std::int64_t tile = (page * memory.shape().block_size + first % memory.shape().block_size) / kTileTokens;
  memory.clear_values(tile);
}

}  // namespace quire
