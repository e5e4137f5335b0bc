// Coded experts 64 weights at a time: patterns of 16 codes in registers, levels by PDEP and PEXT.
#include "expert_code.h"

#if defined(__x86_64__)

#include <cmath>

#include "unpack_codes_avx2.h"

#define FAST __attribute__((target("avx2,f16c,bmi,bmi2,popcnt,lzcnt")))

namespace specter {
namespace {

constexpr std::size_t kHalf = kChunk / 2;

FAST inline __m256i load(const void* words) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(words));
}

FAST inline void store(void* words, __m256i values) {
  _mm256_storeu_si256(static_cast<__m256i*>(words), values);
}

FAST inline __m256i both_halves(__m128i bytes) { return _mm256_broadcastsi128_si256(bytes); }

FAST inline std::uint64_t deposit(std::uint64_t bits, std::uint64_t mask) {
  return _pdep_u64(bits, mask);
}

// 0xff for every set bit.
FAST inline __m256i to_bytes(std::uint32_t bits) {
  const __m256i spread = _mm256_shuffle_epi8(
      _mm256_set1_epi32(static_cast<int>(bits)),
      _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  return _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
}

// 16-bit entries of 16 codes, as tables of their low and high bytes.
struct Table16 {
  __m256i low, high;

  FAST Table16(__m128i first, __m128i second) {
    const __m128i byte = _mm_set1_epi16(0xff);
    low = both_halves(_mm_packus_epi16(_mm_and_si128(first, byte), _mm_and_si128(second, byte)));
    high = both_halves(_mm_packus_epi16(_mm_srli_epi16(first, 8), _mm_srli_epi16(second, 8)));
  }
};

// What the 16 codes of a group leave open, as Ranges.
struct Tables {
  Table16 first;
  __m256i open;
};

// Finds the tables of a group for BF16, all 16 codes at once.
struct Bfloat16Tables {
  __m256 low_edges[2], high_edges[2];
  __m256i last_bin, bin_zero, signs;
  __m128i low_bits;

  FAST Bfloat16Tables(const Edges& edges, int bits) {
    alignas(32) float low[kMostCodes] = {}, high[kMostCodes] = {};
    alignas(32) std::uint16_t last[kMostCodes] = {}, zero[kMostCodes] = {}, sign[kMostCodes] = {};
    const int bins = edges.count + 1;
    for (int code = 0; code < 2 * bins; ++code) {
      const int bin = code % bins;
      low[code] = bin ? edges.in_scales[bin - 1] : 0;
      high[code] = bin < edges.count ? edges.in_scales[bin] : 0;
      last[code] = bin < edges.count ? 0 : 0x8000;
      zero[code] = bin ? 0 : 0xffff;
      sign[code] = code < bins ? 0 : 0x8000;
    }
    for (int half = 0; half < 2; ++half) {
      low_edges[half] = _mm256_load_ps(low + 8 * half);
      high_edges[half] = _mm256_load_ps(high + 8 * half);
    }
    last_bin = load(last);
    bin_zero = load(zero);
    signs = load(sign);
    low_bits = _mm_cvtsi32_si128(bits);
  }

  FAST static __m256i ceiling(const __m256* edges, __m256 scale) {
    const __m256i up = _mm256_set1_epi32(0xffff);
    const __m256i first = _mm256_castps_si256(_mm256_mul_ps(edges[0], scale));
    const __m256i second = _mm256_castps_si256(_mm256_mul_ps(edges[1], scale));
    const __m256i words =
        _mm256_packus_epi32(_mm256_srli_epi32(_mm256_add_epi32(first, up), 16),
                            _mm256_srli_epi32(_mm256_add_epi32(second, up), 16));
    return _mm256_permute4x64_epi64(words, 0xd8);
  }

  FAST Tables operator()(std::uint16_t half) const {
    const __m256 scale = _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
    const __m256i low = ceiling(low_edges, scale);
    const __m256i behind = _mm256_or_si256(ceiling(high_edges, scale), last_bin);
    const __m256i high = _mm256_add_epi16(behind, _mm256_set1_epi16(-1));
    const __m256i span = _mm256_srl_epi16(_mm256_sub_epi16(high, low), low_bits);
    const __m256i closed = _mm256_cmpeq_epi16(span, _mm256_setzero_si256());
    const __m128i narrow =
        _mm_packs_epi16(_mm256_castsi256_si128(closed), _mm256_extracti128_si256(closed, 1));
    const __m256i first = _mm256_or_si256(_mm256_blendv_epi8(low, high, bin_zero), signs);
    return {{_mm256_castsi256_si128(first), _mm256_extracti128_si256(first, 1)},
            both_halves(_mm_xor_si128(narrow, _mm_set1_epi8(-1)))};
  }
};

// The same for FP16, in plain code.
struct Float16Tables {
  const Edges& edges;
  int low_bits;

  FAST Float16Tables(const Edges& with, int bits) : edges(with), low_bits(bits) {}

  FAST Tables operator()(std::uint16_t scale) const {
    const Ranges ranges = ranges_of<Float16>(edges, scale, low_bits);
    const auto* words = reinterpret_cast<const __m128i*>(ranges.first);
    const auto* flags = reinterpret_cast<const __m128i*>(ranges.open);
    return {{_mm_loadu_si128(words), _mm_loadu_si128(words + 1)},
            both_halves(_mm_loadu_si128(flags))};
  }
};

// How the lowest bits of 8 weights lie in as many bytes as each has bits: 16-bit lane `i` gets the
// bytes of weight i, and a multiplication shifts it to the top of the lane.
struct LowBits {
  __m256i bytes, factors;
  __m128i shift;
  std::size_t eight;

  FAST explicit LowBits(int bits) : eight(static_cast<std::size_t>(bits)) {
    alignas(16) std::uint8_t places[16];
    alignas(16) std::uint16_t multipliers[8];
    for (unsigned lane = 0; lane < 8; ++lane) {
      const unsigned bit = lane * static_cast<unsigned>(bits);
      places[2 * lane] = static_cast<std::uint8_t>(bit / 8);
      places[2 * lane + 1] = static_cast<std::uint8_t>(bit / 8 + 1);
      multipliers[lane] = static_cast<std::uint16_t>(1u << (16 - static_cast<unsigned>(bits) - bit % 8));
    }
    bytes = both_halves(_mm_load_si128(reinterpret_cast<const __m128i*>(places)));
    factors = both_halves(_mm_load_si128(reinterpret_cast<const __m128i*>(multipliers)));
    shift = _mm_cvtsi32_si128(16 - bits);
  }

  // Weights 0-7 and 16-23 behind `plane`. Looks at 16 bytes from each eight's start.
  FAST __m256i operator()(const std::uint8_t* plane) const {
    const auto* low = reinterpret_cast<const __m128i*>(plane);
    const auto* high = reinterpret_cast<const __m128i*>(plane + 2 * eight);
    const __m256i packed = _mm256_set_m128i(_mm_loadu_si128(high), _mm_loadu_si128(low));
    const __m256i windows = _mm256_shuffle_epi8(packed, bytes);
    return _mm256_srl_epi16(_mm256_mullo_epi16(windows, factors), shift);
  }
};

// 32 weights: their codes, where they are counted from, which are open.
struct Half {
  __m256i first_low, first_high, down;
  std::uint32_t open;
};

FAST inline Half look_up(__m256i codes, int bits, const Tables& tables) {
  const __m256i bin_mask = _mm256_set1_epi8(static_cast<char>((1 << (bits - 1)) - 1));
  const __m256i bins = _mm256_and_si256(codes, bin_mask);
  const __m256i open = _mm256_shuffle_epi8(tables.open, codes);
  return {_mm256_shuffle_epi8(tables.first.low, codes),
          _mm256_shuffle_epi8(tables.first.high, codes),
          _mm256_cmpeq_epi8(bins, _mm256_setzero_si256()),
          static_cast<std::uint32_t>(_mm256_movemask_epi8(open))};
}

FAST inline __m256i level_bytes(const Levels& levels, unsigned shift) {
  __m256i sum = _mm256_setzero_si256();
  for (int k = 0; k < 4; ++k) {
    if (!levels.plane[k]) continue;
    const __m256i set = to_bytes(static_cast<std::uint32_t>(levels.plane[k] >> shift));
    sum = _mm256_or_si256(sum, _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(1 << k))));
  }
  return sum;
}

FAST inline __m256i apply(__m256i first, __m256i down, __m256i low, __m256i level, __m128i bits) {
  const __m256i r = _mm256_or_si256(low, _mm256_sll_epi16(level, bits));
  return _mm256_add_epi16(first, _mm256_sub_epi16(_mm256_xor_si256(r, down), down));
}

// Writes 32 weights; `plane` is where their lowest bits lie.
FAST inline void write_half(const Half& half, __m256i levels, const LowBits& low_bits,
                            const std::uint8_t* plane, __m128i shift, std::uint16_t* out) {
  const __m256i zero = _mm256_setzero_si256();
  const __m256i first =  // weights 0-7 and 16-23
      apply(_mm256_unpacklo_epi8(half.first_low, half.first_high),
            _mm256_unpacklo_epi8(half.down, half.down), low_bits(plane),
            _mm256_unpacklo_epi8(levels, zero), shift);
  const __m256i second =  // weights 8-15 and 24-31
      apply(_mm256_unpackhi_epi8(half.first_low, half.first_high),
            _mm256_unpackhi_epi8(half.down, half.down), low_bits(plane + low_bits.eight),
            _mm256_unpackhi_epi8(levels, zero), shift);
  store(out, _mm256_permute2x128_si256(first, second, 0x20));
  store(out + 16, _mm256_permute2x128_si256(first, second, 0x31));
}

// Replaces the escapes of a chunk by their patterns.
inline void write_escapes(std::uint64_t escapes, const std::uint8_t* plane, int low_bits,
                          BitReader& reader, std::uint16_t* out) {
  const auto high_bits = static_cast<unsigned>(16 - low_bits);
  for (; escapes; escapes &= escapes - 1) {
    const auto place = static_cast<std::size_t>(__builtin_ctzll(escapes));
    const std::uint64_t high = reader.next(high_bits) & ((1u << high_bits) - 1);
    out[place] = static_cast<std::uint16_t>(high << low_bits | get_low(plane, place, low_bits));
  }
}

template <int Bits, typename MakeTables>
FAST Outcome expand(const Expansion& expansion) {
  const Matrix& matrix = expansion.matrix;
  const int bits = expansion.header.low_bits;
  const Layout layout(matrix, bits);
  const LowBits low_bits(bits);
  const MakeTables make_tables(matrix.edges, bits);
  const __m128i shift = _mm_cvtsi32_si128(bits);
  const std::uint8_t* plane = expansion.refinement + layout.plane;
  BitReader reader{expansion.refinement + layout.stream, 0,
                   block_position(expansion.refinement, matrix.blocks())};
  const std::uint8_t* codes = expansion.codes;
  const std::uint16_t* scale = expansion.scales;
  auto* out = static_cast<std::uint16_t*>(expansion.out);
  std::size_t column = 0, group_end = 0;
  Tables tables = make_tables(0);
  for (std::size_t chunk = 0; chunk < matrix.chunks(); ++chunk) {
    if (block_begins_wrong(expansion, chunk * kChunk, reader.position)) return Outcome::kCorrupt;
    Half halves[2];
    for (std::size_t half = 0; half < 2; ++half) {
      if (column == group_end) {
        tables = make_tables(*scale++);
        group_end += matrix.group_size;
        if (group_end > matrix.width) group_end = matrix.width;
      }
      halves[half] = look_up(unpack<Bits>(codes + half * 4 * Bits), Bits, tables);
      column += kHalf;
    }
    if (column == matrix.width) column = group_end = 0;
    const std::uint64_t open = halves[0].open | std::uint64_t{halves[1].open} << 32;
    const Levels levels = read_levels(reader, open, expansion.header.levels, deposit);
    const std::size_t half_plane = 4 * static_cast<std::size_t>(bits);
    write_half(halves[0], level_bytes(levels, 0), low_bits, plane, shift, out);
    write_half(halves[1], level_bytes(levels, 32), low_bits, plane + half_plane, shift,
               out + kHalf);
    if (levels.rest) write_escapes(levels.rest, plane, bits, reader, out);
    plane += 2 * half_plane;
    codes += 8 * Bits;
    out += kChunk;
  }
  return reader.position == reader.end ? Outcome::kFine : Outcome::kCorrupt;
}

template <typename MakeTables>
Outcome expand_type(const Expansion& expansion) {
  switch (expansion.matrix.base_bits) {
    case 2: return expand<2, MakeTables>(expansion);
    case 3: return expand<3, MakeTables>(expansion);
    default: return expand<4, MakeTables>(expansion);
  }
}

// The planes of 32 weights without a base, and which of them are open.
struct Told {
  __m256i first, second;  // weights 0-7 and 16-23, 8-15 and 24-31
  std::uint32_t open;

  FAST Told(const LowBits& low_bits, const std::uint8_t* plane)
      : first(low_bits(plane)), second(low_bits(plane + low_bits.eight)) {
    const __m256i common = _mm256_set1_epi16(kCommon);
    const __m256i low = _mm256_cmpeq_epi16(_mm256_and_si256(first, common), common);
    const __m256i high = _mm256_cmpeq_epi16(_mm256_and_si256(second, common), common);
    open = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_packs_epi16(low, high)));
  }
};

// BF16 patterns from planes and from how far, as signed bytes in 16 bits, an exponent of the open
// ones lies from `top`.
FAST inline __m256i join_exponents(__m256i told, __m256i around, __m256i top) {
  const __m256i common = _mm256_set1_epi16(kCommon);
  const __m256i place = _mm256_and_si256(told, common);
  const __m256i is_open = _mm256_cmpeq_epi16(place, common);
  const __m256i down = _mm256_sub_epi16(top, place);
  const __m256i exponent = _mm256_blendv_epi8(down, _mm256_add_epi16(top, around), is_open);
  const __m256i in_place =
      _mm256_and_si256(_mm256_slli_epi16(exponent, 7), _mm256_set1_epi16(0x7f80));
  const __m256i mantissa = _mm256_and_si256(_mm256_srli_epi16(told, 2), _mm256_set1_epi16(0x7f));
  const __m256i sign =
      _mm256_and_si256(_mm256_slli_epi16(told, 6), _mm256_set1_epi16(static_cast<short>(0x8000)));
  return _mm256_or_si256(sign, _mm256_or_si256(in_place, mantissa));
}

FAST inline __m256i around_table() {
  alignas(16) std::int8_t around[16];
  for (int level = 0; level < 16; ++level) around[level] = static_cast<std::int8_t>(kAround[level]);
  return both_halves(_mm_load_si128(reinterpret_cast<const __m128i*>(around)));
}

FAST inline void write_half(const Told& told, __m256i levels, __m256i table, std::uint8_t top_byte,
                            std::uint16_t* out) {
  const __m256i around = _mm256_shuffle_epi8(table, levels);
  const __m256i top = _mm256_set1_epi16(top_byte);
  const __m256i first = join_exponents(told.first, _mm256_unpacklo_epi8(around, around), top);
  const __m256i second = join_exponents(told.second, _mm256_unpackhi_epi8(around, around), top);
  store(out, _mm256_permute2x128_si256(first, second, 0x20));
  store(out + 16, _mm256_permute2x128_si256(first, second, 0x31));
}

inline void write_exponents(std::uint64_t escapes, BitReader& reader, std::uint16_t* out) {
  for (; escapes; escapes &= escapes - 1) {
    const auto place = static_cast<std::size_t>(__builtin_ctzll(escapes));
    const std::uint64_t exponent = reader.next(8) & 0xff;
    out[place] = static_cast<std::uint16_t>((out[place] & 0x807fu) | exponent << 7);
  }
}

FAST Outcome expand_bfloat16_exponents(const Expansion& expansion) {
  const Matrix& matrix = expansion.matrix;
  const int bits = expansion.header.low_bits;
  const Layout layout(matrix, bits);
  const LowBits low_bits(bits);
  const __m256i table = around_table();
  const std::uint8_t* plane = expansion.refinement + layout.plane;
  const std::uint8_t* top = expansion.refinement + layout.exponents;
  BitReader reader{expansion.refinement + layout.stream, 0,
                   block_position(expansion.refinement, matrix.blocks())};
  auto* out = static_cast<std::uint16_t*>(expansion.out);
  std::size_t column = 0, group_end = matrix.group_size < matrix.width ? matrix.group_size : matrix.width;
  for (std::size_t chunk = 0; chunk < matrix.chunks(); ++chunk) {
    if (block_begins_wrong(expansion, chunk * kChunk, reader.position)) return Outcome::kCorrupt;
    const std::size_t half_plane = 4 * static_cast<std::size_t>(bits);
    const Told told[2] = {{low_bits, plane}, {low_bits, plane + half_plane}};
    const std::uint64_t open = told[0].open | std::uint64_t{told[1].open} << 32;
    const Levels levels = read_levels(reader, open, expansion.header.levels, deposit);
    for (unsigned half = 0; half < 2; ++half) {
      write_half(told[half], level_bytes(levels, 32 * half), table, *top, out + kHalf * half);
      column += kHalf;
      if (column < group_end) continue;
      ++top;
      if (column == matrix.width) column = group_end = 0;
      group_end += matrix.group_size;
      if (group_end > matrix.width) group_end = matrix.width;
    }
    if (levels.rest) write_exponents(levels.rest, reader, out);
    plane += 2 * half_plane;
    out += kChunk;
  }
  return reader.position == reader.end ? Outcome::kFine : Outcome::kCorrupt;
}

// Of a wider plane, the lowest bits of a weight do not fit a byte.
constexpr int kMostBytePlane = 8;

FAST inline __m256d squares(__m128i patterns) {
  const __m128i words = _mm_slli_epi32(patterns, 16);
  const __m256d values = _mm256_cvtps_pd(_mm_castsi128_ps(words));
  return _mm256_mul_pd(values, values);
}

// The scale of a group of BF16 weights, a multiple of 32 of them.
FAST std::uint16_t scale_of(const std::uint16_t* weights, std::size_t count) {
  const __m128i finite = _mm_set1_epi16(0x7f80);
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  for (std::size_t place = 0; place < count; place += 8) {
    const __m128i words = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights + place));
    const __m128i magnitudes = _mm_and_si128(words, _mm_set1_epi16(0x7fff));
    const __m128i kept = _mm_and_si128(magnitudes, _mm_cmpgt_epi16(finite, magnitudes));
    low = _mm256_add_pd(low, squares(_mm_cvtepu16_epi32(kept)));
    high = _mm256_add_pd(high, squares(_mm_cvtepu16_epi32(_mm_srli_si128(kept, 8))));
  }
  alignas(32) double sums[4];
  _mm256_store_pd(sums, _mm256_add_pd(low, high));
  const double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  const double mean = std::sqrt(sum / static_cast<double>(count));
  return to_float16(static_cast<float>(mean < 65504.0 ? mean : 65504.0));
}

// What it takes to code the weights of one group.
struct Coder {
  __m256i below[kMostEdges];  // the last pattern below each edge
  Tables tables;

  FAST Coder(const Edges& edges, const Bfloat16Tables& make_tables, std::uint16_t scale)
      : tables(make_tables(scale)) {
    std::uint16_t starts[kMostCodes / 2 + 1];
    bin_starts<Bfloat16>(edges, scale, starts);
    for (int edge = 0; edge < edges.count; ++edge) {
      below[edge] = _mm256_set1_epi16(static_cast<short>(starts[edge + 1] - 1));
    }
  }
};

template <int Bits>
FAST inline __m256i codes_of(__m256i weights, const Coder& coder) {
  const __m256i magnitudes = _mm256_and_si256(weights, _mm256_set1_epi16(0x7fff));
  const __m256i sign = _mm256_srli_epi16(weights, 15);
  __m256i codes = _mm256_slli_epi16(sign, Bits - 1);
  for (int edge = 0; edge < (1 << (Bits - 1)) - 1; ++edge) {
    codes = _mm256_sub_epi16(codes, _mm256_cmpgt_epi16(magnitudes, coder.below[edge]));
  }
  return codes;
}

// Bits 0 to Count - 1 of the bytes of a word, one behind another.
template <int Count>
FAST inline std::uint64_t gather(std::uint64_t bytes) {
  return _pext_u64(bytes, ((1u << Count) - 1) * std::uint64_t{0x0101010101010101});
}

// 32 codes to 4 * Bits bytes.
template <int Bits>
FAST inline void write_codes(__m256i codes, std::uint8_t* out) {
  alignas(32) std::uint64_t eights[4];
  store(eights, codes);
  std::uint64_t packed[4];
  for (int eight = 0; eight < 4; ++eight) packed[eight] = gather<Bits>(eights[eight]);
  if constexpr (Bits == 4) {
    const std::uint64_t words[2] = {packed[0] | packed[1] << 32, packed[2] | packed[3] << 32};
    std::memcpy(out, words, sizeof words);
  } else if constexpr (Bits == 3) {
    const std::uint64_t low = packed[0] | packed[1] << 24 | packed[2] << 48;
    const auto high = static_cast<std::uint32_t>(packed[2] >> 16 | packed[3] << 8);
    std::memcpy(out, &low, sizeof low);
    std::memcpy(out + sizeof low, &high, sizeof high);
  } else {
    const std::uint64_t word = packed[0] | packed[1] << 16 | packed[2] << 32 | packed[3] << 48;
    std::memcpy(out, &word, sizeof word);
  }
}

// Refinements of 16 weights: level, at most `most`, and lowest bits.
struct Refined {
  __m256i level, low;

  FAST Refined(__m256i weights, __m256i first, __m256i down, __m128i low_bits, __m256i most) {
    const __m256i magnitude = _mm256_set1_epi16(0x7fff);
    const __m256i patterns = _mm256_and_si256(weights, magnitude);
    const __m256i up = _mm256_sub_epi16(patterns, _mm256_and_si256(first, magnitude));
    const __m256i r = _mm256_sub_epi16(_mm256_xor_si256(up, down), down);
    level = _mm256_min_epu16(_mm256_srl_epi16(r, low_bits), most);
    const __m256i source = _mm256_blendv_epi8(r, patterns, _mm256_cmpeq_epi16(level, most));
    const __m256i mask = _mm256_srl_epi16(_mm256_set1_epi16(-1), _mm_sub_epi64(_mm_cvtsi32_si128(16), low_bits));
    low = _mm256_and_si256(source, mask);
  }
};

// The levels and the plane's bytes of 32 weights.
struct Compressed {
  __m256i level, low;
  std::uint32_t open;
};

template <int Bits>
FAST inline Compressed compress_half(const std::uint16_t* weights, const Coder& coder,
                                     std::uint8_t* codes, __m128i low_bits, __m256i most) {
  const __m256i first16 = load(weights), second16 = load(weights + 16);
  const __m256i first = _mm256_permute2x128_si256(first16, second16, 0x20);   // 0-7, 16-23
  const __m256i second = _mm256_permute2x128_si256(first16, second16, 0x31);  // 8-15, 24-31
  const __m256i places =
      _mm256_packus_epi16(codes_of<Bits>(first, coder), codes_of<Bits>(second, coder));
  write_codes<Bits>(places, codes);
  const Half half = look_up(places, Bits, coder.tables);
  const Refined low_half(first, _mm256_unpacklo_epi8(half.first_low, half.first_high),
                         _mm256_unpacklo_epi8(half.down, half.down), low_bits, most);
  const Refined high_half(second, _mm256_unpackhi_epi8(half.first_low, half.first_high),
                          _mm256_unpackhi_epi8(half.down, half.down), low_bits, most);
  return {_mm256_packus_epi16(low_half.level, high_half.level),
          _mm256_packus_epi16(low_half.low, high_half.low), half.open};
}

// The lowest bits of 32 weights to the plane. `is_last`: nothing may be written behind them.
FAST inline void write_plane(__m256i low, int low_bits, std::uint8_t* plane, bool is_last) {
  alignas(32) std::uint64_t eights[4];
  store(eights, low);
  const std::uint64_t mask = ((1u << low_bits) - 1) * std::uint64_t{0x0101010101010101};
  for (int eight = 0; eight < 4; ++eight) {
    const std::uint64_t packed = _pext_u64(eights[eight], mask);
    std::memcpy(plane, &packed, is_last ? static_cast<std::size_t>(low_bits) : sizeof packed);
    plane += low_bits;
  }
}

FAST inline std::uint64_t above(__m256i first, __m256i second, int level) {
  const __m256i bytes = _mm256_set1_epi8(static_cast<char>(level));
  const auto low = static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpgt_epi8(first, bytes)));
  const auto high =
      static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpgt_epi8(second, bytes)));
  return low | std::uint64_t{high} << 32;
}

FAST inline void write_chunk(const Compressed* halves, const std::uint16_t* weights, int low_bits,
                             int most, BitWriter& writer) {
  std::uint64_t reached = halves[0].open | std::uint64_t{halves[1].open} << 32;
  for (int level = 0; reached && level < most; ++level) {
    const std::uint64_t goes_on = above(halves[0].level, halves[1].level, level) & reached;
    writer.append(_pext_u64(goes_on, reached), count_bits(reached));
    reached = goes_on;
  }
  for (; reached; reached &= reached - 1) {
    const std::uint32_t pattern = weights[__builtin_ctzll(reached)];
    writer.append(pattern >> low_bits, static_cast<unsigned>(16 - low_bits));
  }
}

template <int Bits>
FAST std::size_t compress(const Compression& compression) {
  const Matrix& matrix = compression.matrix;
  const int bits = compression.low_bits;
  const Layout layout(matrix, bits);
  if (layout.stream + kPadding > compression.capacity) return 0;
  const Bfloat16Tables make_tables(matrix.edges, bits);
  const __m128i low_bits = _mm_cvtsi32_si128(bits);
  const __m256i most = _mm256_set1_epi16(static_cast<short>(compression.levels));
  std::uint8_t* plane = compression.refinement + layout.plane;
  std::uint8_t* codes = compression.codes;
  std::uint16_t* scale = compression.scales;
  BitWriter writer{compression.refinement + layout.stream, 0};
  const auto* weights = static_cast<const std::uint16_t*>(compression.weights);
  std::size_t column = 0, group_end = 0;
  Coder coder(matrix.edges, make_tables, 0);
  for (std::size_t chunk = 0; chunk < matrix.chunks(); ++chunk) {
    if (!has_room(compression, layout, writer)) return 0;
    const std::size_t block = chunk * kChunk / kBlock;
    if (chunk * kChunk % kBlock == 0) {
      set_block_position(compression.refinement, block, writer.position);
    }
    Compressed halves[2];
    for (std::size_t half = 0; half < 2; ++half) {
      const std::uint16_t* some = weights + half * kHalf;
      if (column == group_end) {
        group_end += matrix.group_size;
        if (group_end > matrix.width) group_end = matrix.width;
        *scale = scale_of(some, group_end - column);
        coder = Coder(matrix.edges, make_tables, *scale++);
      }
      halves[half] = compress_half<Bits>(some, coder, codes, low_bits, most);
      write_plane(halves[half].low, bits, plane, chunk + 1 == matrix.chunks());
      plane += 4 * bits;
      codes += 4 * Bits;
      column += kHalf;
    }
    if (column == matrix.width) column = group_end = 0;
    write_chunk(halves, weights, bits, compression.levels, writer);
    weights += kChunk;
  }
  return finish(compression, layout, writer.position);
}

}  // namespace

Outcome expand_exponents_avx2(const Expansion& expansion) {
  if (expansion.matrix.type != WeightType::kBfloat16) return expand_exponents(expansion);
  return expand_bfloat16_exponents(expansion);
}

bool has_bit_instructions() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                          __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                          __builtin_cpu_supports("popcnt");
  return has;
}

Outcome expand_avx2(const Expansion& expansion) {
  return expansion.matrix.type == WeightType::kBfloat16 ? expand_type<Bfloat16Tables>(expansion)
                                                        : expand_type<Float16Tables>(expansion);
}

std::size_t compress_avx2(const Compression& compression) {
  const bool fast =
      compression.matrix.type == WeightType::kBfloat16 && compression.low_bits <= kMostBytePlane;
  if (!fast) return compress_portable(compression);
  switch (compression.matrix.base_bits) {
    case 2: return compress<2>(compression);
    case 3: return compress<3>(compression);
    default: return compress<4>(compression);
  }
}

}  // namespace specter

#else

namespace specter {

bool has_bit_instructions() { return false; }
Outcome expand_avx2(const Expansion& expansion) { return expand_portable(expansion); }
Outcome expand_exponents_avx2(const Expansion& expansion) { return expand_exponents(expansion); }
std::size_t compress_avx2(const Compression& compression) { return compress_portable(compression); }

}  // namespace specter

#endif
