#include "kv_cache/kv_cache.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>

namespace quire {
namespace {

std::unique_ptr<KvFile> open_file(const KvConfig& config) {
  if (!config.fd) return nullptr;
  const std::size_t bytes = KvMemory::bytes(config.shape);
  return std::make_unique<KvFile>(*config.fd, config.shape.num_pages, config.block_size, bytes, config.state);
}

std::unique_ptr<SealedPages> open_log(const KvConfig& config) {
  if (!config.log_sealed_pages) return nullptr;
  if (!config.fd) throw std::invalid_argument("log_sealed_pages needs the file of kv_memory_fd");
  return std::make_unique<SealedPages>(static_cast<std::size_t>(config.shape.num_pages));
}

std::unique_ptr<PageLedger> open_ledger(KvFile* file, const KvMemory& memory, ThreadPool& threads,
                                        const std::string& model, SealedPages* log) {
  return file == nullptr ? nullptr : std::make_unique<PageLedger>(*file, memory, threads, model_key(model), log);
}

std::unique_ptr<StateLedger> open_states(KvFile* file, const PageLedger* pages, ThreadPool& threads,
                                         const StateShape& shape) {
  if (file == nullptr || shape.record_bytes == 0) return nullptr;
  return std::make_unique<StateLedger>(*file, *pages, threads, shape);
}

}  // namespace

KvCache::KvCache(const KvConfig& config, Device& device)
    : file(open_file(config)),
      memory(file ? file->tiles() : device.allocate(KvMemory::bytes(config.shape)), device, config.shape),
      sealed_pages(open_log(config)),
      ledger(open_ledger(file.get(), memory, device.threads(), config.model, sealed_pages.get())),
      state_ledger(open_states(file.get(), ledger.get(), device.threads(), config.state)),
      sequences(config.shape.num_pages, config.block_size, config.vocab_size, memory.extent(), ledger.get(),
                config.state, state_ledger.get()) {
  prefault();  // maps what is resident in a file
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
