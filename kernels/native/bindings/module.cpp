#include "bindings/bindings.h"

NB_MODULE(_native, m) {
  m.doc() =
      "The native extension (sources: native/): JIT compiler, threads, packed weights, KV cache, grammars, sampler and "
      "plan runner.";
#ifdef NDEBUG
  nanobind::set_leak_warnings(false);  // constants of Python modules live until the process ends
#endif
  quire::bind_abi(m);
  quire::bind_checksum(m);
  quire::bind_jit(m);
  quire::bind_threads(m);
  quire::bind_weights(m);
  quire::bind_device(m);
  quire::bind_grammar(m);
  quire::bind_sampling(m);
  quire::bind_states(m);
  quire::bind_prefix_watch(m);
  quire::bind_sequences(m);
  quire::bind_speculation(m);
  quire::bind_runner(m);
}
