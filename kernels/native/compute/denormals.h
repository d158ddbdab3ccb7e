#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace quire {

/// Makes the SSE and AVX arithmetic of this thread read denormals as zero and flush denormal results to zero (DAZ and
/// FTZ) during its lifetime, as AMX tiles always do. The numeric contract requires it wherever floats are computed.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
#else
  FlushDenormals() {}  // user-provided, so that compilers do not warn of an unused variable
#endif
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

#if defined(__x86_64__)
 private:
  static constexpr unsigned kFlushToZero = 0x8000;
  static constexpr unsigned kDenormalsAreZero = 0x0040;
  unsigned saved_;
#endif
};

}  // namespace quire
