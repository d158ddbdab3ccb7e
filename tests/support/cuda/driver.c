// A driver of NVIDIA's GPUs without one: it has the functions of libcuda.so.1 that Quire calls, and runs kernels on the
// CPU. $QUIRE_PTX_TO_SO is a command that turns a file of PTX into a library, which is kept in $QUIRE_PTX_FOLDER.
#include <dlfcn.h>
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*Entry)(const uint64_t *parameters, uint32_t thread, uint32_t threads, uint32_t block);
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, BAD_KERNEL = 218, FOUND_NOTHING = 500 };
static int context;

int cuInit(unsigned flags) { return flags ? INVALID : OK; }
int cuDeviceGetCount(int *count) { return *count = 1, OK; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal ? INVALID : OK; }
int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "Emulated GPU"), OK; }
int cuDeviceGetAttribute(int *value, int which, int device) {
  const char *managed = getenv("QUIRE_EMULATED_MANAGED");
  *value = which == 16 ? 4 : which == 75 ? 9 : which == 76 ? 0 : which == 89 ? !managed : 0;
  return OK;
}
int cuDevicePrimaryCtxRetain(void **to, int device) { return *to = &context, OK; }
int cuDevicePrimaryCtxRelease_v2(int device) { return OK; }
int cuCtxSetCurrent(void *given) { return given == &context ? OK : INVALID; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = (size_t)4 << 30, *total = (size_t)8 << 30, OK; }
int cuMemAllocManaged(unsigned long long *address, size_t size, unsigned flags) {
  void *memory;
  if (flags != 1 || size == 0) return INVALID;
  if (size > (size_t)8 << 30 || posix_memalign(&memory, 512, size)) return NO_MEMORY;
  memset(memory, 0xab, size < 1 << 20 ? size : 1 << 20);  // it need not be zero
  return *address = (uintptr_t)memory, OK;
}
int cuMemFree_v2(unsigned long long address) { return free((void *)(uintptr_t)address), OK; }
int cuMemsetD8_v2(unsigned long long address, unsigned char value, size_t count) {
  return memset((void *)(uintptr_t)address, value, count), OK;
}
int cuModuleLoadData(void **module, const void *image) {
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
  return *module ? OK : BAD_KERNEL;
}
int cuModuleUnload(void *module) { return dlclose(module), OK; }
int cuModuleGetFunction(void **function, void *module, const char *name) {
  return *function = dlsym(module, name), *function ? OK : FOUND_NOTHING;
}
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
  if (!gx || !bx || bx > 1024 || gy * gz * by * bz != 1 || shared || extra) return INVALID;
  const uint64_t values[] = {*(uint64_t *)parameters[0], *(uint64_t *)parameters[1], *(uint64_t *)parameters[2]};
  const unsigned state = _mm_getcsr();
  _mm_setcsr(state | 0x8040);  // denormals are zero
  for (unsigned block = 0; block < gx; block++)
    for (unsigned thread = 0; thread < bx; thread++) ((Entry)function)(values, thread, bx, block);
  _mm_setcsr(state);
  return OK;
}
int cuCtxSynchronize(void) { return OK; }
int cuGetErrorName(int error, const char **name) { return *name = "CUDA_ERROR", OK; }
int cuGetErrorString(int error, const char **text) { return *text = "the emulated driver says no", OK; }
