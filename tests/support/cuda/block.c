// Runs the threads of one block, on a stack each: a thread runs until it waits for others, then another one does. In
// which order changes, so that a kernel in which threads should wait for each other, and do not, gives wrong results.
#include "block.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { STACK = 512 << 10, PAGE = 4096, BARRIER = 1u << 31 };
typedef enum { READY, WAITING, DONE } State;

typedef struct {
  Block block;  // the first member: what kernels know
  void *scheduler;
  uint8_t *stacks;
  const Function *function;
  const uint64_t *parameters;
  uint32_t threads, number, running;
  void *stack[MOST_THREADS];
  State state[MOST_THREADS];
  uint32_t site[MOST_THREADS], mask[MOST_THREADS];
  Words given[MOST_THREADS], shown[MOST_THREADS];
  char error[200];
} Running;

static _Thread_local Running *running;

// Saves the registers that calls keep, and goes on at another stack.
void quire_switch(void **from, void *to);
__asm__(
    ".text\n.globl quire_switch\n.hidden quire_switch\nquire_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");

static void pause_thread(Running *r, uint32_t thread, State state) {
  r->state[thread] = state;
  quire_switch(&r->stack[thread], r->scheduler);
}

static void begin(void) {
  Running *r = running;
  const uint32_t thread = r->running;
  r->function->entry(r->parameters, thread, r->threads, r->number, &r->block);
  pause_thread(r, thread, DONE);
}

static const Words *meet(Block *block, uint32_t thread, uint32_t site, uint32_t mask, const uint32_t *words,
                         int count) {
  Running *r = (Running *)block;
  if (!(mask >> thread % WARP & 1)) block->fail(block, site, "a thread is not among those that it meets");
  memcpy(r->given[thread], words, count * sizeof *words);
  r->site[thread] = site, r->mask[thread] = mask;
  pause_thread(r, thread, WAITING);
  return (const Words *)&r->shown[thread / WARP * WARP];
}

static void barrier(Block *block, uint32_t thread, uint32_t site) {
  Running *r = (Running *)block;
  r->site[thread] = site | BARRIER;
  pause_thread(r, thread, WAITING);
}

static void fail(Block *block, uint32_t site, const char *reason) {
  Running *r = (Running *)block;
  if (!*r->error) snprintf(r->error, sizeof r->error, "%s (statement %u)", reason, site & ~BARRIER);
  quire_switch(&r->stack[r->running], r->scheduler);  // which does not come back
}

static int all_wait(const Running *r, uint32_t first, uint32_t mask, uint32_t site) {
  for (uint32_t i = 0; i < WARP; i++)
    if (mask >> i & 1 && (first + i >= r->threads || r->state[first + i] != WAITING || r->site[first + i] != site ||
                          r->mask[first + i] != mask))
      return 0;
  return 1;
}

// Lets the threads go on that have met. Returns how many.
static uint32_t release(Running *r) {
  uint32_t released = 0, at_barrier = 0;
  for (uint32_t t = 0; t < r->threads; t++)
    at_barrier += r->state[t] == WAITING && r->site[t] == r->site[0] && r->site[t] & BARRIER;
  for (uint32_t t = 0; t < r->threads; t++) {
    if (r->state[t] != WAITING) continue;
    if (r->site[t] & BARRIER) {
      if (at_barrier == r->threads) r->state[t] = READY, released++;
      continue;
    }
    const uint32_t first = t / WARP * WARP, mask = r->mask[t];
    if (!all_wait(r, first, mask, r->site[t])) continue;
    for (uint32_t i = 0; i < WARP; i++)
      if (mask >> i & 1) {
        memcpy(r->shown[first + i], r->given[first + i], sizeof(Words));
        r->state[first + i] = READY, released++;
      }
  }
  return released;
}

static void run_ready(Running *r, int backwards) {
  for (uint32_t i = 0; i < r->threads && !*r->error; i++) {
    const uint32_t thread = backwards ? r->threads - 1 - i : i;
    if (r->state[thread] != READY) continue;
    r->running = thread;
    quire_switch(&r->scheduler, r->stack[thread]);
  }
}

static Running *prepare(void) {
  if (running) return running;
  Running *r = calloc(1, sizeof *r);
  const size_t size = (size_t)STACK * MOST_THREADS;
  r->stacks = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (r->stacks == MAP_FAILED) abort();
  for (size_t at = 0; at < size; at += STACK) mprotect(r->stacks + at, PAGE, PROT_NONE);
  r->block = (Block){meet, barrier, fail};
  return running = r;
}

// Runs one block of a launch. Returns NULL, or what is wrong with it.
const char *run_block(const Function *function, const uint64_t *parameters, uint32_t number, uint32_t threads,
                      uint32_t more_shared) {
  memset(function->shared, 0xab, function->shared_bytes + more_shared);
  if (!function->meets) {
    for (uint32_t thread = 0; thread < threads; thread++) function->entry(parameters, thread, threads, number, NULL);
    return NULL;
  }
  Running *r = prepare();
  r->function = function, r->parameters = parameters, r->threads = threads, r->number = number, *r->error = 0;
  for (uint32_t t = 0; t < threads; t++) {
    void **top = (void **)(r->stacks + (size_t)STACK * (t + 1)) - 1;  // as a call would leave it
    *--top = (void *)begin;
    r->stack[t] = top - 6;
    memset(r->stack[t], 0, 6 * sizeof *top);
    r->state[t] = READY;
  }
  for (uint32_t phase = 0;; phase++) {
    run_ready(r, (number + phase * 2654435761u) >> 13 & 1);
    if (*r->error) return r->error;
    uint32_t done = 0;
    for (uint32_t t = 0; t < threads; t++) done += r->state[t] == DONE;
    if (done == threads) return NULL;
    if (release(r)) continue;
    uint32_t t = 0;
    while (r->state[t] != WAITING) t++;
    const char *kind = r->site[t] & BARRIER ? "not all threads of a block reach a barrier"
                                            : "not all threads that a shuffle names reach it";
    snprintf(r->error, sizeof r->error, "%s (statement %u)", kind, r->site[t] & ~BARRIER);
    return r->error;
  }
}
