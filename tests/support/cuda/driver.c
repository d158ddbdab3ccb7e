// A driver of NVIDIA's GPUs without one: it has the functions of libcuda.so.1 that Quire calls, and runs kernels on the
// CPU. $QUIRE_PTX_TO_SO is a command that turns a file of PTX into a library, which is kept in $QUIRE_PTX_FOLDER.
#include <dlfcn.h>
#include <immintrin.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "block.h"

const char *run_block(const Function *function, const uint64_t *parameters, uint32_t number, uint32_t threads,
                      uint32_t more_shared);

enum { OK = 0, INVALID = 1, NO_MEMORY = 2, BAD_KERNEL = 218, FOUND_NOTHING = 500, LOST = 719, NOT_SUPPORTED = 801 };
enum { CAPTURE_INVALIDATED = 901 };
enum { PAGE = 4096, ALIGNMENT = 256 };  // of memory
static int context;
static char launch_failure[200];

// Memory that was allocated. That of the GPU is protected from the host: it is accessible while the GPU works alone, and
// what accesses it otherwise is killed.
typedef struct Part {
  char *memory;
  size_t size;
  int is_host, is_pooled;
  struct Part *next;
} Part;
static Part *parts;
static int num_inside;  // number of threads and streams for which the GPU works
static pthread_mutex_t parts_lock = PTHREAD_MUTEX_INITIALIZER;  // guards both, and the pool
static int num_copies, num_waits;  // calls of the driver
static size_t bytes_to_host, bytes_to_gpu;

int emulated_copies(void) { return num_copies; }
int emulated_waits(void) { return num_waits; }
size_t emulated_bytes_to_host(void) { return bytes_to_host; }
size_t emulated_bytes_to_gpu(void) { return bytes_to_gpu; }

static Part *part_of(const void *address, size_t size) {
  const char *at = address;
  pthread_mutex_lock(&parts_lock);
  Part *part = parts;
  while (part && !(at >= part->memory && at + size <= part->memory + part->size)) part = part->next;
  pthread_mutex_unlock(&parts_lock);
  return part;
}

static size_t whole(size_t size) { return (size + PAGE - 1) & ~(size_t)(PAGE - 1); }
static char *base_of(const Part *part) { return (char *)((uintptr_t)part->memory & ~(uintptr_t)(PAGE - 1)); }

static void protect(int mode) {
  for (Part *part = parts; part; part = part->next)
    if (!part->is_host) mprotect(base_of(part), whole(part->size), mode);
}

// A stream, and the graph that its launches become parts of while it is captured.
typedef struct {
  void *function;
  unsigned blocks, threads, shared;
  uint64_t values[3];
} Node;
typedef struct {
  size_t count;
  Node *nodes;
} Graph;
typedef struct {
  Graph *captured;
  int is_broken;  // by what a capture does not allow
  int works;      // until it is waited for
} Stream;

// Between these the GPU works, and on behalf of a stream until it is waited for.
static void enter(Stream *on) {
  pthread_mutex_lock(&parts_lock);
  const int begins = num_inside++ == 0;
  if (on && !on->works) on->works = 1, num_inside++;
  if (begins) protect(PROT_READ | PROT_WRITE);
  pthread_mutex_unlock(&parts_lock);
}
static void leave(void) {
  pthread_mutex_lock(&parts_lock);
  if (--num_inside == 0) protect(PROT_NONE);
  pthread_mutex_unlock(&parts_lock);
}
static void end_work(Stream *on) {
  pthread_mutex_lock(&parts_lock);
  if (on->works && --num_inside == 0) protect(PROT_NONE);
  on->works = 0;
  pthread_mutex_unlock(&parts_lock);
}

// The pool takes memory from the GPU as it is needed, and keeps it until it is trimmed.
static size_t pool_used, pool_reserved;
static uint64_t pool_threshold;
static int pool;

static size_t total_bytes(void) { return (size_t)8 << 30; }

// Returns the bytes of the GPU that nobody has, and no pool.
static size_t free_bytes(void) {
  const char *others = getenv("QUIRE_EMULATED_OTHERS");  // MiB that other programs have
  size_t taken = pool_reserved + (others ? strtoull(others, NULL, 10) << 20 : (size_t)4 << 30);
  for (Part *part = parts; part; part = part->next) taken += part->is_host || part->is_pooled ? 0 : whole(part->size);
  return taken < total_bytes() ? total_bytes() - taken : 0;
}

static void *allocate(size_t size, int is_host, int is_pooled) {
  Part *part = malloc(sizeof *part);
  pthread_mutex_lock(&parts_lock);
  const int fits = is_host || whole(size) <= free_bytes() + (is_pooled ? pool_reserved - pool_used : 0);
  char *base = MAP_FAILED;
  if (fits) base = mmap(NULL, whole(size) + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void *memory = NULL;
  if ((void *)base != MAP_FAILED) {
    mprotect(base + whole(size), PAGE, PROT_NONE);  // what reads beyond the end must be seen
    memory = base + ((whole(size) - size) & ~(size_t)(ALIGNMENT - 1));
    memset(memory, 0xab, size < 1 << 20 ? size : 1 << 20);  // it need not be zero
    if (!is_host && !num_inside) mprotect(base, whole(size), PROT_NONE);
    if (is_pooled && (pool_used += whole(size)) > pool_reserved) pool_reserved = pool_used;
    *part = (Part){memory, size, is_host, is_pooled, parts};
    parts = part;
  }
  pthread_mutex_unlock(&parts_lock);
  if (!memory) free(part);
  return memory;
}

static int release(void *memory, int is_host, int is_pooled) {
  pthread_mutex_lock(&parts_lock);
  Part **place = &parts, *part;
  while ((part = *place) && part->memory != memory) place = &part->next;
  const int is_good = part && part->is_host == is_host && part->is_pooled == is_pooled;
  if (is_good) {
    *place = part->next;
    if (is_pooled) pool_used -= whole(part->size);
    if (is_pooled && pool_reserved > pool_threshold) pool_reserved = pool_used;
    munmap(base_of(part), whole(part->size) + PAGE);
  }
  pthread_mutex_unlock(&parts_lock);
  return is_good ? (free(part), OK) : INVALID;
}

int cuInit(unsigned flags) { return flags ? INVALID : OK; }
int cuDeviceGetCount(int *count) { return *count = 1, OK; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal ? INVALID : OK; }
int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "Emulated GPU"), OK; }
int cuDeviceGetAttribute(int *value, int which, int device) {
  const char *major = getenv("QUIRE_EMULATED_MAJOR");  // of the compute capability
  *value = which == 16 ? 4 : which == 75 ? 9 : 0;
  if (which == 41) *value = !getenv("QUIRE_EMULATED_UNIFIED");
  if (which == 115) *value = !getenv("QUIRE_EMULATED_POOLS");
  if (which == 39) *value = 2048;
  if (which == 75 && major) *value = atoi(major);
  return OK;
}
int cuDevicePrimaryCtxRetain(void **to, int device) { return *to = &context, OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuCtxSetCurrent(void *given) {
  if (getenv("QUIRE_EMULATED_LOST_CONTEXT")) return LOST;
  return given == &context ? OK : INVALID;
}
int cuMemGetInfo_v2(size_t *free, size_t *total) {
  pthread_mutex_lock(&parts_lock);
  *free = free_bytes();
  pthread_mutex_unlock(&parts_lock);
  return *total = total_bytes(), OK;
}
// Returns whether a stream may do what is no part of a graph. While it is captured that breaks the graph.
static int may_work(void *stream) {
  Stream *on = stream;
  if (on && on->captured) on->is_broken = 1;
  return !on || !on->captured;
}

static int allocation_failure(void) {
  const char *error = getenv("QUIRE_EMULATED_ALLOCATION");  // the error of all allocations
  return error ? atoi(error) : OK;
}
static int allocate_on_gpu(unsigned long long *address, size_t size, int is_pooled) {
  if (allocation_failure()) return allocation_failure();
  if (size == 0 || (is_pooled && getenv("QUIRE_EMULATED_POOLS"))) return INVALID;
  return (*address = (uintptr_t)allocate(size, 0, is_pooled)) ? OK : NO_MEMORY;
}
int cuMemAlloc_v2(unsigned long long *address, size_t size) { return allocate_on_gpu(address, size, 0); }
int cuMemFree_v2(unsigned long long address) { return release((void *)(uintptr_t)address, 0, 0); }
int cuMemAllocAsync(unsigned long long *address, size_t size, void *stream) {
  return may_work(stream) ? allocate_on_gpu(address, size, 1) : INVALID;
}
int cuMemFreeAsync(unsigned long long address, void *stream) {
  return may_work(stream) ? release((void *)(uintptr_t)address, 0, 1) : INVALID;
}
int cuDeviceGetDefaultMemPool(void **made, int device) { return *made = &pool, device ? INVALID : OK; }
int cuMemPoolSetAttribute(void *given, int which, void *value) {
  if (given != &pool || which != 4) return INVALID;
  return pool_threshold = *(uint64_t *)value, OK;
}
int cuMemPoolGetAttribute(void *given, int which, void *value) {
  if (given != &pool || (which != 5 && which != 7)) return INVALID;
  pthread_mutex_lock(&parts_lock);
  *(uint64_t *)value = which == 5 ? pool_reserved : pool_used;
  pthread_mutex_unlock(&parts_lock);
  return OK;
}
int cuMemPoolTrimTo(void *given, size_t kept) {
  if (given != &pool || kept) return INVALID;
  pthread_mutex_lock(&parts_lock);
  pool_reserved = pool_used;
  pthread_mutex_unlock(&parts_lock);
  return OK;
}
int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
  if (allocation_failure()) return allocation_failure();
  if (flags != 3 || size == 0) return INVALID;
  return (*address = allocate(size, 1, 0)) ? OK : NO_MEMORY;
}
int cuMemFreeHost(void *address) { return release(address, 1, 0); }

static int is_on_gpu(unsigned long long address, size_t size) {
  const Part *part = part_of((void *)(uintptr_t)address, size);
  return part && !part->is_host;
}
static int num_clears;  // of any thread
int cuMemsetD2D8Async(unsigned long long address, size_t pitch, unsigned char value, size_t width, size_t height,
                      void *stream) {
  if (!width || !height || pitch < width || pitch > 0x7FFFFFFF && height > 1 || !is_on_gpu(address, pitch * (height - 1) + width)) return INVALID;
  if (!may_work(stream)) return INVALID;
  __atomic_fetch_add(&num_clears, 1, __ATOMIC_SEQ_CST);
  const char *fails = getenv("QUIRE_EMULATED_CLEAR");  // the error of all that is cleared
  if (fails) return atoi(fails);
  enter(stream);
  for (size_t i = 0; i < height; i++) memset((char *)(uintptr_t)address + i * pitch, value, width);
  return leave(), OK;
}
int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t count, void *stream) {
  return cuMemsetD2D8Async(address, count, value, count, 1, stream);
}
// Copies rows between memory that was allocated here, or from other memory of the host too if `is_pageable`.
static int copy(unsigned long long to, size_t to_pitch, unsigned long long from, size_t from_pitch, size_t width,
                size_t height, int is_pageable, void *stream) {
  const size_t to_size = to_pitch * (height - 1) + width, from_size = from_pitch * (height - 1) + width;
  const Part *target = part_of((void *)(uintptr_t)to, to_size), *source = part_of((void *)(uintptr_t)from, from_size);
  if (!height || !width || !target || (!source && (!is_pageable || part_of((void *)(uintptr_t)from, 1)))) return INVALID;
  if (!may_work(stream)) return INVALID;
  __atomic_fetch_add(&num_copies, 1, __ATOMIC_SEQ_CST);
  const int from_host = !source || source->is_host;
  if (target->is_host && !from_host) __atomic_fetch_add(&bytes_to_host, width * height, __ATOMIC_SEQ_CST);
  if (!target->is_host && from_host) __atomic_fetch_add(&bytes_to_gpu, width * height, __ATOMIC_SEQ_CST);
  enter(stream);
  for (size_t i = 0; i < height; i++)
    memcpy((char *)(uintptr_t)to + i * to_pitch, (char *)(uintptr_t)from + i * from_pitch, width);
  return leave(), OK;
}
int cuMemcpyAsync(unsigned long long to, unsigned long long from, size_t size, void *stream) {
  return copy(to, size, from, size, size, 1, 0, stream);
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t size, void *stream) {
  return is_on_gpu(to, size) ? copy(to, size, (uintptr_t)from, size, size, 1, 1, stream) : INVALID;
}
typedef struct {
  size_t x, y;
  int type;
  void *host;
  unsigned long long address;
  void *array;
  size_t pitch;
} Side;
typedef struct {
  Side from, to;
  size_t width, height;
} Copy2d;
static int is_good_side(const Side *side, size_t width) {
  return !side->x && !side->y && side->type == 4 && side->pitch >= width && side->pitch <= 0x7FFFFFFF;
}
int cuMemcpy2DAsync_v2(const Copy2d *given, void *stream) {
  const Side *from = &given->from, *to = &given->to;
  if (!is_good_side(from, given->width) || !is_good_side(to, given->width)) return INVALID;
  if (getenv("QUIRE_EMULATED_PITCH") && is_on_gpu(from->address, 1) && is_on_gpu(to->address, 1)) return INVALID;
  return copy(to->address, to->pitch, from->address, from->pitch, given->width, given->height, 0, stream);
}

// Bytes of local memory of a function's threads, by the text of its PTX; the last one first.
typedef struct Local {
  const void *function;
  int bytes;
  struct Local *next;
} Local;
static Local *locals;
static void note_local(void *module, const char *ptx) {
  Local *made = malloc(sizeof *made);
  *made = (Local){dlsym(module, "entry_info"), 0, NULL};
  int size;
  for (const char *at = ptx; (at = strstr(at, ".local .align")); at++)
    if (sscanf(at, ".local .align %*d .b8 %*[A-Za-z0-9_$][%d]", &size) == 1) made->bytes += size;
  pthread_mutex_lock(&parts_lock);
  made->next = locals, locals = made;
  pthread_mutex_unlock(&parts_lock);
}

int cuModuleLoadData(void **module, const void *image) {
  if (!strncmp(image, "cubin\n", 6)) image = (const char *)image + 6;  // what the linker makes
  uint64_t hash = 14695981039346656037u;
  for (const unsigned char *c = image; *c; c++) hash = (hash ^ *c) * 1099511628211u;
  char path[512], command[2048];
  snprintf(path, sizeof path, "%s/%016lx.so", getenv("QUIRE_PTX_FOLDER"), hash);
  if (access(path, R_OK)) {
    char source[600];
    snprintf(source, sizeof source, "%s.%d.ptx", path, getpid());
    FILE *file = fopen(source, "w");
    if (!file) return BAD_KERNEL;
    fputs(image, file);
    fclose(file);
    snprintf(command, sizeof command, "%s %s %s.new && mv %s.new %s", getenv("QUIRE_PTX_TO_SO"), source, source, source,
             path);
    if (system(command)) return BAD_KERNEL;
  }
  *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (*module) note_local(*module, image);
  return *module ? OK : BAD_KERNEL;
}

// A linker, whose code of a GPU is "cubin" and the PTX.
static const char CUBIN[] = "cubin\n";
typedef struct {
  char *code, *log;
  size_t log_size;
} Linker;
int cuDriverGetVersion(int *version) {
  const char *given = getenv("QUIRE_EMULATED_VERSION");
  return *version = given ? atoi(given) : 12080, OK;
}
int cuLinkCreate_v2(unsigned count, int *options, void **values, void **linker) {
  Linker *made = calloc(1, sizeof *made);
  for (unsigned i = 0; i < count; i++) {
    if (options[i] == 5) made->log = values[i];
    if (options[i] == 6) made->log_size = (size_t)values[i];
  }
  return *linker = made, OK;
}
int cuLinkAddData_v2(void *linker, int type, void *data, size_t size, const char *name, unsigned count, int *options,
                     void **values) {
  Linker *to = linker;
  if (type != 1 || to->code || !size || ((char *)data)[size - 1]) return INVALID;
  to->code = malloc(sizeof CUBIN + size);
  return strcpy(to->code, CUBIN), strcat(to->code, data), OK;
}
int cuLinkComplete(void *linker, void **code, size_t *size) {
  Linker *of = linker;
  if (!of->code) return INVALID;
  void *module;
  const int error = cuModuleLoadData(&module, of->code);
  if (error && of->log) snprintf(of->log, of->log_size, "the emulated assembler can't read it");
  if (error) return error;
  return dlclose(module), *code = of->code, *size = strlen(of->code), OK;
}
int cuLinkDestroy(void *linker) { return free(((Linker *)linker)->code), free(linker), OK; }
int cuFuncGetAttribute(int* value, int which, void *function) {
  if (which != 3) return INVALID;
  pthread_mutex_lock(&parts_lock);
  const Local *each = locals;
  while (each && each->function != function) each = each->next;
  pthread_mutex_unlock(&parts_lock);
  return *value = each ? each->bytes : 0, OK;
}
int cuModuleUnload(void *module) { return dlclose(module), OK; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  char info[200];
  snprintf(info, sizeof info, "%s_info", name);
  return *function = dlsym(module, info), *function ? OK : FOUND_NOTHING;
}
int cuFuncSetAttribute(void *function, int which, int value) {
  Function *of = function;
  if (which != 8 || !of->has_more || value < 0 || of->shared_bytes + value > MOST_SHARED) return INVALID;
  return of->most_more = value, OK;
}
int cuStreamCreate(void **stream, unsigned flags) {
  if (flags != 1) return INVALID;
  return (*stream = calloc(1, sizeof(Stream))) ? OK : NO_MEMORY;
}
int cuStreamDestroy_v2(void *stream) { return end_work(stream), free(stream), OK; }
int cuStreamSynchronize(void *stream) {
  const char *failure = getenv("QUIRE_EMULATED_FAILURE");  // a file: once it is there, the GPU is lost
  static int is_lost;
  end_work(stream);
  if (is_lost || (failure && !unlink(failure))) return is_lost = 1, LOST;
  __atomic_fetch_add(&num_waits, 1, __ATOMIC_SEQ_CST);
  return may_work(stream) ? OK : INVALID;
}
int cuStreamBeginCapture_v2(void *stream, int mode) {
  if (getenv("QUIRE_EMULATED_GRAPHS")) return NOT_SUPPORTED;
  Stream *on = stream;
  if (on->captured || mode != 1) return INVALID;
  on->is_broken = 0;
  if (!(on->captured = calloc(1, sizeof(Graph)))) return NO_MEMORY;
  const int before = __atomic_load_n(&num_clears, __ATOMIC_SEQ_CST);
  // If that is asked for it takes until other threads have cleared memory, or 20 s.
  for (int left = 20000; getenv("QUIRE_EMULATED_SLOW_CAPTURE") && !on->is_broken && left; left--) {
    if (__atomic_load_n(&num_clears, __ATOMIC_SEQ_CST) >= before + 2) break;
    usleep(1000);
  }
  return OK;
}
int cuStreamEndCapture(void *stream, void **graph) {
  Stream *on = stream;
  *graph = on->captured, on->captured = NULL;
  if (!*graph) return INVALID;
  if (!on->is_broken) return OK;
  free(((Graph *)*graph)->nodes), free(*graph), *graph = NULL;
  return CAPTURE_INVALIDATED;
}
static Graph *copy_of(const Graph *graph) {
  Graph *made = malloc(sizeof *made);
  *made = (Graph){graph->count, malloc(graph->count * sizeof(Node) + 1)};
  memcpy(made->nodes, graph->nodes, graph->count * sizeof(Node));
  return made;
}
int cuGraphInstantiateWithFlags(void **made, void *graph, unsigned long long flags) {
  return flags ? INVALID : (*made = copy_of(graph), OK);
}
int cuGraphDestroy(void *graph) { return free(((Graph *)graph)->nodes), free(graph), OK; }
int cuGraphExecDestroy(void *graph) { return cuGraphDestroy(graph); }
static int record(Graph *graph, const Node *node) {
  graph->nodes = realloc(graph->nodes, (graph->count + 1) * sizeof *node);
  return graph->nodes[graph->count++] = *node, OK;
}

int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  if (!gx || !bx || bx > 1024 || gy * gz * by * bz != 1 || extra) return INVALID;
  const Function *kernel = function;
  if (shared > kernel->most_more) return INVALID;
  if (kernel->most_threads && bx > kernel->most_threads) return INVALID;
  const uint64_t values[] = {*(uint64_t *)parameters[0], *(uint64_t *)parameters[1], *(uint64_t *)parameters[2]};
  if (stream && ((Stream *)stream)->captured)
    return record(((Stream *)stream)->captured, &(Node){function, gx, bx, shared, {values[0], values[1], values[2]}});
  enter(stream);
  const unsigned state = _mm_getcsr();
  _mm_setcsr(state | 0x8040);  // denormals are zero
  const char *failure = NULL;
  for (unsigned block = 0; block < gx && !failure; block++)
    failure = run_block(kernel, values, block, bx, shared);
  _mm_setcsr(state);
  if (failure) snprintf(launch_failure, sizeof launch_failure, "%s", failure);
  return leave(), failure ? LOST : OK;
}
int cuGraphLaunch(void *graph, void *stream) {
  if (((Stream *)stream)->captured) return INVALID;
  int error = OK;
  enter(stream);
  for (size_t i = 0; i < ((Graph *)graph)->count && !error; i++) {
    Node *node = &((Graph *)graph)->nodes[i];
    void *parameters[] = {&node->values[0], &node->values[1], &node->values[2]};
    error = cuLaunchKernel(node->function, node->blocks, 1, 1, node->threads, 1, 1, node->shared, stream,
                           parameters, NULL);
  }
  return leave(), error;
}
int cuCtxSynchronize(void) { return OK; }
int cuGetErrorName(int error, const char **name) {
  static _Thread_local char text[24];
  return snprintf(text, sizeof text, "CUDA_ERROR_%d", error), *name = text, OK;
}
int cuGetErrorString(int error, const char **text) {
  return *text = error == LOST && *launch_failure ? launch_failure : "the emulated driver says no", OK;
}
