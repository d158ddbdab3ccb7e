// Printed by scripts/generate_sampling_ranges.py from the ranges in protocol/messages.py.
#pragma once

namespace quire::sampling_ranges {

/// Numbers from `low` to `high`; `low` belongs to them if `closed`. `text` says so to users.
struct Range {
  float low, high;
  bool closed;
  const char* text;
};

inline constexpr Range temperature{0.0f, 3.4e+38f, true, "at least 0 and finite"};
inline constexpr Range top_k{-1.0f, 9.223372036854776e+18f, true, "from -1 to 9223372036854775807"};
inline constexpr Range top_p{0.0f, 1.0f, false, "above 0 and at most 1"};
inline constexpr Range min_p{0.0f, 1.0f, true, "from 0 to 1"};
inline constexpr Range repetition_penalty{0.0f, 3.4e+38f, false, "above 0 and finite"};
inline constexpr Range presence_penalty{-2.0f, 2.0f, true, "from -2 to 2"};
inline constexpr Range frequency_penalty{-2.0f, 2.0f, true, "from -2 to 2"};
inline constexpr Range min_tokens{0.0f, 9.223372036854776e+18f, true, "from 0 to 9223372036854775807"};
inline constexpr Range logit_bias{-100.0f, 100.0f, true, "from -100 to 100"};

}  // namespace quire::sampling_ranges
