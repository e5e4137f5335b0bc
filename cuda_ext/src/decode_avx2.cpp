// Decoding 32 weights at a time. A group has at most 16 different weights, so each is scaled and
// rounded once and then looked up: for 16-bit types a byte shuffle finds the low bytes of 32
// weights and another one the high bytes.
#include "decode_codes.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "number_types.h"
#include "unpack_codes_avx2.h"

namespace specter {
namespace {

constexpr std::size_t kBlock = kCodesAtOnce;

struct ToBfloat16 {
  AVX2 static __m256i words(__m256 values) {  // in the low half of each 32-bit lane
    const __m256i bits = _mm256_castps_si256(values);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
  }
  // 16 values of 16 bits, in order.
  AVX2 static __m256i round(__m256 low, __m256 high) {
    const __m256i by_lane = _mm256_packus_epi32(words(low), words(high));
    return _mm256_permute4x64_epi64(by_lane, 0xd8);
  }
};

struct ToFloat16 {
  AVX2 static __m256i round(__m256 low, __m256 high) {
    return _mm256_set_m128i(_mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
  }
};

AVX2 inline __m256 broadcast_scale(std::uint16_t scale) {
  return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(scale)));
}

AVX2 inline void store(std::byte* out, __m256i values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), values);
}

// Table of 16-bit weights: their low bytes and their high bytes.
struct ByteTables {
  __m256i low, high;

  AVX2 explicit ByteTables(__m256i words) {
    const __m128i first = _mm256_castsi256_si128(words);
    const __m128i second = _mm256_extracti128_si256(words, 1);
    const __m128i byte = _mm_set1_epi16(0xff);
    low = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte)));
    high = _mm256_broadcastsi128_si256(
        _mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8)));
  }

  AVX2 void look_up(__m256i codes, std::byte* out) const {
    const __m256i low_bytes = _mm256_shuffle_epi8(low, codes);
    const __m256i high_bytes = _mm256_shuffle_epi8(high, codes);
    const __m256i first = _mm256_unpacklo_epi8(low_bytes, high_bytes);   // codes 0-7, 16-23
    const __m256i second = _mm256_unpackhi_epi8(low_bytes, high_bytes);  // codes 8-15, 24-31
    store(out, _mm256_permute2x128_si256(first, second, 0x20));
    store(out + 32, _mm256_permute2x128_si256(first, second, 0x31));
  }
};

template <int Bits, typename Type>
AVX2 void decode_words(const Coded& coded) {
  const __m256 low = _mm256_loadu_ps(coded.table);
  const __m256 high = _mm256_loadu_ps(coded.table + 8);
  for_each_group(coded, [&](const Group& group) AVX2 {
    const __m256 scale = broadcast_scale(group.scale);
    const __m256i words = Type::round(_mm256_mul_ps(low, scale), _mm256_mul_ps(high, scale));
    const ByteTables tables(words);
    std::size_t place = 0;
    for (; place + kBlock <= group.count; place += kBlock) {
      tables.look_up(unpack<Bits>(group.codes + place * Bits / 8), group.out + place * 2);
    }
    if (place == group.count) return;
    std::uint16_t values[kTableSize];
    store(reinterpret_cast<std::byte*>(values), words);
    decode_rest(group, Bits, place, values);
  });
}

// Eight weights whose codes are the low 8 bytes of `codes`.
AVX2 inline __m256 look_up_floats(__m128i codes, __m256 low, __m256 high) {
  const __m256i places = _mm256_cvtepu8_epi32(codes);
  const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(places, 28));  // bit 3 chooses
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, places),
                          _mm256_permutevar8x32_ps(high, places), upper);
}

template <int Bits>
AVX2 void decode_floats(const Coded& coded) {
  for_each_group(coded, [&](const Group& group) AVX2 {
    const __m256 scale = broadcast_scale(group.scale);
    const __m256 low = _mm256_mul_ps(_mm256_loadu_ps(coded.table), scale);
    const __m256 high = _mm256_mul_ps(_mm256_loadu_ps(coded.table + 8), scale);
    auto* out = reinterpret_cast<float*>(group.out);
    std::size_t place = 0;
    for (; place + kBlock <= group.count; place += kBlock) {
      alignas(32) std::uint8_t codes[kBlock];
      store(reinterpret_cast<std::byte*>(codes), unpack<Bits>(group.codes + place * Bits / 8));
      for (std::size_t eight = 0; eight < kBlock; eight += 8) {
        const auto* some = reinterpret_cast<const __m128i*>(codes + eight);
        _mm256_storeu_ps(out + place + eight, look_up_floats(_mm_loadl_epi64(some), low, high));
      }
    }
    if (place == group.count) return;
    float values[kTableSize];
    _mm256_storeu_ps(values, low);
    _mm256_storeu_ps(values + 8, high);
    decode_rest(group, Bits, place, values);
  });
}

AVX2 inline __m256 scaled_bytes(const std::uint8_t* codes, __m256 scale) {
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
  return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)), scale);
}

struct Bfloat16Bytes {
  static constexpr std::size_t kSize = 2;
  AVX2 static void store16(std::byte* out, __m256 low, __m256 high) {
    store(out, ToBfloat16::round(low, high));
  }
};

struct Float16Bytes {
  static constexpr std::size_t kSize = 2;
  AVX2 static void store16(std::byte* out, __m256 low, __m256 high) {
    store(out, ToFloat16::round(low, high));
  }
};

struct Float32Bytes {
  static constexpr std::size_t kSize = 4;
  AVX2 static void store16(std::byte* out, __m256 low, __m256 high) {
    store(out, _mm256_castps_si256(low));
    store(out + 32, _mm256_castps_si256(high));
  }
};

template <typename Type>
AVX2 void decode_bytes(const Coded& coded) {
  for_each_group(coded, [&](const Group& group) AVX2 {
    const __m256 scale = broadcast_scale(group.scale);
    std::size_t place = 0;
    for (; place + 16 <= group.count; place += 16) {
      Type::store16(group.out + place * Type::kSize, scaled_bytes(group.codes + place, scale),
                    scaled_bytes(group.codes + place + 8, scale));
    }
    if (place == group.count) return;
    std::uint8_t codes[16] = {};
    std::byte values[16 * Type::kSize];
    std::memcpy(codes, group.codes + place, group.count - place);
    Type::store16(values, scaled_bytes(codes, scale), scaled_bytes(codes + 8, scale));
    std::memcpy(group.out + place * Type::kSize, values, (group.count - place) * Type::kSize);
  });
}

template <int Bits>
void decode_table(const Coded& coded) {
  switch (coded.out_type) {
    case OutType::kFloat32: return decode_floats<Bits>(coded);
    case OutType::kBfloat16: return decode_words<Bits, ToBfloat16>(coded);
    case OutType::kFloat16: return decode_words<Bits, ToFloat16>(coded);
  }
}

}  // namespace

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return has;
}

void decode_avx2(const Coded& coded) {
  switch (coded.bits) {
    case 2: return decode_table<2>(coded);
    case 3: return decode_table<3>(coded);
    case 4: return decode_table<4>(coded);
    default: break;
  }
  switch (coded.out_type) {
    case OutType::kFloat32: return decode_bytes<Float32Bytes>(coded);
    case OutType::kBfloat16: return decode_bytes<Bfloat16Bytes>(coded);
    case OutType::kFloat16: return decode_bytes<Float16Bytes>(coded);
  }
}

}  // namespace specter

#else

namespace specter {

bool has_avx2() { return false; }
void decode_avx2(const Coded& coded) { decode_portable(coded); }

}  // namespace specter

#endif
