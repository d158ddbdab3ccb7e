#include "bindings/bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "Quire's native core: JIT, threads, KV pages, sampler and plan runner.";
  quire::bind_jit(m);
  quire::bind_support(m);
  quire::bind_sequences(m);
  quire::bind_grammar(m);
  quire::bind_runner(m);
}
