// What a kernel that ptx_to_c.py has translated asks of the block that its threads belong to, and says of itself.
#pragma once
#include <stdint.h>

enum { WARP = 32, MOST_WORDS = 12, MOST_THREADS = 1024, MOST_SHARED = 99 << 10 };
typedef uint32_t Words[MOST_WORDS];  // what one thread shows the others when they meet

typedef struct Block Block;
struct Block {
  // Waits until all threads of a warp that `mask` names have come to `site`, each with its words. Returns those of all
  // threads of the warp, which stay as they are until this thread meets others again.
  const Words *(*meet)(Block *block, uint32_t thread, uint32_t site, uint32_t mask, const uint32_t *words, int count);
  void (*barrier)(Block *block, uint32_t thread, uint32_t site);  // waits until all threads of the block have come
  void (*fail)(Block *block, uint32_t site, const char *reason);  // ends the launch
};

typedef void (*Entry)(const uint64_t *parameters, uint32_t thread, uint32_t threads, uint32_t block, Block *mates);

typedef struct {
  Entry entry;
  uint8_t *shared;  // shared memory, which all blocks use in turn
  uint32_t shared_bytes;
  uint32_t most_threads;  // of a block; 0: any number
  int has_more;           // whether launches say how much more shared memory there is
  int meets;              // whether threads wait for each other
  uint32_t most_more;     // bytes that launches may have more, once the driver was asked for them
} Function;
