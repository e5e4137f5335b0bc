// Unpacking 32 codes of 2, 3 or 4 bits at a time. Only for x86-64.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define AVX2 __attribute__((target("avx2,f16c")))

namespace specter {

constexpr std::size_t kCodesAtOnce = 32;

// How to find 16 codes in 2 * Bits bytes: 16-bit lane `i` gets the bytes in which codes 2i and
// 2i + 1 lie, and a multiplication shifts the pair to the top of the lane.
template <int Bits>
struct Windows {
  std::array<std::uint8_t, 16> bytes{};
  std::array<std::uint16_t, 8> factors{};

  constexpr Windows() {
    for (std::size_t pair = 0; pair < 8; ++pair) {
      const std::size_t bit = pair * 2 * Bits;
      const bool crosses = bit % 8 + 2 * Bits > 8;
      constexpr std::uint8_t kZero = 0x80;
      bytes[2 * pair] = static_cast<std::uint8_t>(bit / 8);
      bytes[2 * pair + 1] = crosses ? static_cast<std::uint8_t>(bit / 8 + 1) : kZero;
      factors[pair] = static_cast<std::uint16_t>(1u << (16 - 2 * Bits - bit % 8));
    }
  }
};

template <int Bits>
constexpr Windows<Bits> kWindows{};

template <typename T>
AVX2 inline __m256i in_both_halves(const T& sixteen_bytes) {
  static_assert(sizeof sixteen_bytes == 16);
  __m128i half;
  std::memcpy(&half, &sixteen_bytes, sizeof half);
  return _mm256_broadcastsi128_si256(half);
}

template <typename Word>
inline std::uint64_t load(const std::uint8_t* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

// The 2 * Bits bytes of 16 codes, and not a byte behind them.
template <int Bits>
AVX2 inline __m128i load_half(const std::uint8_t* codes) {
  std::uint64_t word;
  if constexpr (Bits == 4) {
    word = load<std::uint64_t>(codes);
  } else if constexpr (Bits == 3) {
    word = load<std::uint32_t>(codes) | load<std::uint16_t>(codes + 4) << 32;
  } else {
    word = load<std::uint32_t>(codes);
  }
  return _mm_cvtsi64_si128(static_cast<long long>(word));
}

// 32 codes, one a byte, in order.
template <int Bits>
AVX2 inline __m256i unpack(const std::uint8_t* codes) {
  const __m256i packed =
      _mm256_set_m128i(load_half<Bits>(codes + 2 * Bits), load_half<Bits>(codes));
  const __m256i windows = _mm256_shuffle_epi8(packed, in_both_halves(kWindows<Bits>.bytes));
  const __m256i at_top = _mm256_mullo_epi16(windows, in_both_halves(kWindows<Bits>.factors));
  const __m256i pairs = _mm256_srli_epi16(at_top, 16 - 2 * Bits);
  constexpr short kMask = (1 << Bits) - 1;
  const __m256i even = _mm256_and_si256(pairs, _mm256_set1_epi16(kMask));
  const __m256i odd = _mm256_and_si256(_mm256_slli_epi16(pairs, 8 - Bits),
                                       _mm256_set1_epi16(static_cast<short>(kMask << 8)));
  return _mm256_or_si256(even, odd);
}

}  // namespace specter
