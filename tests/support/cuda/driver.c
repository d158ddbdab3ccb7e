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

// Memory that was allocated. That of the GPU is protected from the host while no kernel runs if $QUIRE_EMULATED_FAULTS
// is set; then emulated_faults counts the accesses of the host, for each of which a GPU would move a page.
typedef struct Part {
  char *memory;
  size_t size;
  int is_host;
  struct Part *next;
} Part;
static Part *parts;
static pthread_mutex_t parts_lock = PTHREAD_MUTEX_INITIALIZER;
static int num_faults, watches, num_inside;
static size_t bytes_to_host, bytes_prefetched;

int emulated_faults(void) { return num_faults; }
size_t emulated_bytes_to_host(void) { return bytes_to_host; }
size_t emulated_bytes_prefetched(void) { return bytes_prefetched; }

static Part *part_of(const void *address, size_t size) {
  const char *at = address;
  pthread_mutex_lock(&parts_lock);
  Part *part = parts;
  while (part && !(at >= part->memory && at + size <= part->memory + part->size)) part = part->next;
  pthread_mutex_unlock(&parts_lock);
  return part;
}

static size_t whole(size_t size) { return (size + PAGE - 1) & ~(size_t)(PAGE - 1); }

static void protect(int mode) {
  if (!watches) return;
  pthread_mutex_lock(&parts_lock);
  for (Part *part = parts; part; part = part->next)
    if (!part->is_host) mprotect(part->memory, whole(part->size), mode);
  pthread_mutex_unlock(&parts_lock);
}

// Between these the GPU works. One thread at a time may.
static void enter(void) {
  if (watches && num_inside++ == 0) protect(PROT_READ | PROT_WRITE);
}
static void leave(void) {
  if (watches && --num_inside == 0) protect(PROT_NONE);
}

static void on_fault(int number, siginfo_t *info, void *state) {
  char *page = (char *)((uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1));
  for (Part *part = parts; part; part = part->next)
    if (!part->is_host && page >= part->memory && page < part->memory + whole(part->size)) {
      __atomic_fetch_add(&num_faults, 1, __ATOMIC_RELAXED);
      mprotect(page, 4096, PROT_READ | PROT_WRITE);
      return;
    }
  signal(SIGSEGV, SIG_DFL);
}

static void *allocate(size_t size, int is_host) {
  if (!parts && getenv("QUIRE_EMULATED_FAULTS")) {
    const struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    watches = 1;
    sigaction(SIGSEGV, &action, NULL);
  }
  Part *part = malloc(sizeof *part);
  char *base = mmap(NULL, whole(size) + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if ((void *)base == MAP_FAILED) return free(part), NULL;
  mprotect(base + whole(size), PAGE, PROT_NONE);  // what reads beyond the end must be seen
  void *memory = base + (watches ? 0 : (whole(size) - size) & ~(size_t)(ALIGNMENT - 1));
  memset(memory, 0xab, size < 1 << 20 ? size : 1 << 20);  // it need not be zero
  pthread_mutex_lock(&parts_lock);
  *part = (Part){memory, size, is_host, parts};
  parts = part;
  pthread_mutex_unlock(&parts_lock);
  return memory;
}

static int release(void *memory, int is_host) {
  pthread_mutex_lock(&parts_lock);
  Part **place = &parts, *part;
  while ((part = *place) && part->memory != memory) place = &part->next;
  if (part && part->is_host == is_host) *place = part->next;
  pthread_mutex_unlock(&parts_lock);
  if (!part || part->is_host != is_host) return INVALID;
  munmap((char *)((uintptr_t)memory & ~(uintptr_t)(PAGE - 1)), whole(part->size) + PAGE);
  return free(part), OK;
}

int cuInit(unsigned flags) { return flags ? INVALID : OK; }
int cuDeviceGetCount(int *count) { return *count = 1, OK; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal ? INVALID : OK; }
int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "Emulated GPU"), OK; }
int cuDeviceGetAttribute(int *value, int which, int device) {
  const char *managed = getenv("QUIRE_EMULATED_MANAGED");
  const char *major = getenv("QUIRE_EMULATED_MAJOR");  // of the compute capability
  *value = which == 16 ? 4 : which == 75 ? 9 : which == 76 ? 0 : which == 89 ? !managed : which == 41;
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
  const char *others = getenv("QUIRE_EMULATED_OTHERS");  // MiB that other programs have
  size_t taken = others ? strtoull(others, NULL, 10) << 20 : (size_t)4 << 30;
  pthread_mutex_lock(&parts_lock);
  for (Part *part = parts; part; part = part->next) taken += part->is_host ? 0 : whole(part->size);
  pthread_mutex_unlock(&parts_lock);
  *total = (size_t)8 << 30;
  return *free = taken < *total ? *total - taken : 0, OK;
}
static int allocation_failure(void) {
  const char *error = getenv("QUIRE_EMULATED_ALLOCATION");  // the error of all allocations
  return error ? atoi(error) : OK;
}
int cuMemAllocManaged(unsigned long long *address, size_t size, unsigned flags) {
  if (allocation_failure()) return allocation_failure();
  if (flags != 1 || size == 0) return INVALID;
  if (!(*address = (uintptr_t)allocate(size, 0))) return NO_MEMORY;
  return OK;
}
int cuMemFree_v2(unsigned long long address) { return release((void *)(uintptr_t)address, 0); }
int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
  if (allocation_failure()) return allocation_failure();
  if (flags != 3 || size == 0) return INVALID;
  return (*address = allocate(size, 1)) ? OK : NO_MEMORY;
}
int cuMemFreeHost(void *address) { return release(address, 1); }
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
} Stream;

// Returns whether a stream may do what is no part of a graph. While it is captured that breaks the graph.
static int may_work(void *stream) {
  Stream *on = stream;
  if (on && on->captured) on->is_broken = 1;
  return !on || !on->captured;
}

static int is_managed(unsigned long long address, size_t size) {
  const Part *part = part_of((void *)(uintptr_t)address, size);
  return part && !part->is_host;
}
int cuMemAdvise(unsigned long long address, size_t size, int advice, int device) {
  return is_managed(address, size) && ((advice == 3 && device == 0) || (advice == 5 && device == -1)) ? OK : INVALID;
}
int cuMemPrefetchAsync(unsigned long long address, size_t size, int device, void *stream) {
  if (!is_managed(address, size) || device || !may_work(stream)) return INVALID;
  bytes_prefetched += size;
  return enter(), leave(), OK;
}
static int num_clears;  // of any thread
int cuMemsetD2D8Async(unsigned long long address, size_t pitch, unsigned char value, size_t width, size_t height,
                      void *stream) {
  if (!width || !height || pitch < width || pitch > 0x7FFFFFFF && height > 1 || !is_managed(address, pitch * (height - 1) + width)) return INVALID;
  if (!may_work(stream)) return INVALID;
  __atomic_fetch_add(&num_clears, 1, __ATOMIC_SEQ_CST);
  const char *fails = getenv("QUIRE_EMULATED_CLEAR");  // the error of all that is cleared
  if (fails) return atoi(fails);
  enter();
  for (size_t i = 0; i < height; i++) memset((char *)(uintptr_t)address + i * pitch, value, width);
  return leave(), OK;
}
int cuMemsetD8Async(unsigned long long address, unsigned char value, size_t count, void *stream) {
  return cuMemsetD2D8Async(address, count, value, count, 1, stream);
}
static int copy(void *to, const void *from, size_t size) { return enter(), memcpy(to, from, size), leave(), OK; }
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t size, void *stream) {
  if (!is_managed(to, size) || !is_managed(from, size) || !may_work(stream)) return INVALID;
  return copy((void *)(uintptr_t)to, (void *)(uintptr_t)from, size);
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t size, void *stream) {
  if (!may_work(stream)) return INVALID;
  return is_managed(to, size) && !is_managed((uintptr_t)from, 1) ? copy((void *)(uintptr_t)to, from, size) : INVALID;
}
int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t size, void *stream) {
  if (!may_work(stream)) return INVALID;
  bytes_to_host += size;
  return is_managed(from, size) && !is_managed((uintptr_t)to, 1) ? copy(to, (void *)(uintptr_t)from, size) : INVALID;
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
int cuStreamDestroy_v2(void *stream) { return free(stream), OK; }
int cuStreamSynchronize(void *stream) {
  const char *failure = getenv("QUIRE_EMULATED_FAILURE");  // a file: once it is there, the GPU is lost
  static int is_lost;
  if (is_lost || (failure && !unlink(failure))) return is_lost = 1, LOST;
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
  enter();
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
  for (size_t i = 0; i < ((Graph *)graph)->count; i++) {
    Node *node = &((Graph *)graph)->nodes[i];
    void *parameters[] = {&node->values[0], &node->values[1], &node->values[2]};
    const int error = cuLaunchKernel(node->function, node->blocks, 1, 1, node->threads, 1, 1, node->shared, stream,
                                     parameters, NULL);
    if (error) return error;
  }
  return OK;
}
int cuCtxSynchronize(void) { return OK; }
int cuGetErrorName(int error, const char **name) {
  static _Thread_local char text[24];
  return snprintf(text, sizeof text, "CUDA_ERROR_%d", error), *name = text, OK;
}
int cuGetErrorString(int error, const char **text) {
  return *text = error == LOST && *launch_failure ? launch_failure : "the emulated driver says no", OK;
}
