#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>

#include <cstdint>
#endif

namespace quire {

/// Makes the arithmetic of this thread read denormals as zero and flush denormal results to zero during its lifetime,
/// as AMX tiles always do: DAZ and FTZ of x86, FZ of ARM. The numeric contract requires it wherever floats are
/// computed.
///
/// x86 flushes what is denormal after it has been rounded, ARM what would be before. So a result that rounds up to
/// 2^-126 is kept by x86, and flushed by ARM unless the CPU has FEAT_AFP, whose AH asks for the order of x86.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
#elif defined(__aarch64__)
  FlushDenormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    set(saved_ | kFlushToZero | (has_alternate_handling() ? kAfterRounding | kInputsAreZero : 0));
  }
  ~FlushDenormals() { set(saved_); }
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
#elif defined(__aarch64__)
 private:
  static constexpr std::uint64_t kInputsAreZero = 1U << 0;  // FIZ; FZ alone does both unless AH is set
  static constexpr std::uint64_t kAfterRounding = 1U << 1;  // AH
  static constexpr std::uint64_t kFlushToZero = 1U << 24;   // FZ
  static constexpr unsigned long kHwcap2Afp = 1UL << 20;    // older headers lack it

  static bool has_alternate_handling() { return (getauxval(AT_HWCAP2) & kHwcap2Afp) != 0; }
  // Memory and the order of instructions: no arithmetic may move across.
  static void set(std::uint64_t value) { __asm__ volatile("msr fpcr, %0" : : "r"(value) : "memory"); }

  std::uint64_t saved_;
#endif
};

}  // namespace quire
