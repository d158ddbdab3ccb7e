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
  return std::make_unique<KvFile>(*config.fd, config.shape.num_pages, config.block_size, bytes);
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

}  // namespace

KvCache::KvCache(const KvConfig& config, Arena& arena, ThreadPool& threads)
    : file(open_file(config)),
      memory(file ? file->tiles() : static_cast<std::byte*>(arena.allocate(KvMemory::bytes(config.shape))), threads,
             config.shape),
      sealed_pages(open_log(config)),
      ledger(open_ledger(file.get(), memory, threads, config.model, sealed_pages.get())),
      sequences(config.shape.num_pages, config.block_size, config.vocab_size, memory.extent(), ledger.get()) {
  prefault();  // maps what is resident in a file
}

void KvCache::prefault() {
  const std::int64_t committed = sequences.pages().committed(), held = sequences.pages().held_pages();
  const std::int64_t extent = memory.extent(), last = (committed - extent) / 2;  // held when `committed` grew
  memory.prefault(committed, committed + std::clamp<std::int64_t>(4 * (held - last), 0, extent));
}

}  // namespace quire
