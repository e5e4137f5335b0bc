// Coded experts: the exact weights as a base (a draft's packed codes) and a refinement.
//
// A code of the base leaves a range of magnitude patterns [low, high] open. The refinement says where
// in it the weight lies: r = high - pattern in the bin that reaches down to zero, pattern - low
// elsewhere. (A base of 8 bits has no sign at zero: there r is doubled and the sign added.) The lowest `low_bits` bits of r go to a plane of fixed width. What is left of r, its
// level, is nonzero only for codes whose range is wider than that plane can tell; those are *open*,
// and their levels are written in unary, 64 weights (a chunk) at a time and level by level: one bit
// for every weight that has reached the level, set if it goes on. A weight that passes `levels`
// levels is an escape: its plane holds the lowest bits of its pattern, and the others, the sign on top,
// follow the chunk's levels. Blocks of 1024 weights have their place in the bit stream written down, so that
// they can be decoded independently.
//
//   header | bit position of each block and of the end, u32 | plane | bit stream | 16 bytes
//
// Without a base (0 bits), three neighbouring exponents of each group are common, the highest of them
// written before the plane, a byte a group. A weight's plane holds its place among the three (0: the
// highest), then mantissa and sign; a place of 3 is open, and its level chooses one of the exponents
// around the three (kAround). The exponents of escapes follow the chunk's levels.
//
// Weights are numbered along the rows; bits fill bytes from the lowest up; numbers are little-endian.
// runtime/specter_runtime/codec/reference.py is the definition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "number_types.h"

namespace specter {

constexpr std::size_t kChunk = 64;
constexpr std::size_t kBlock = 1024;
constexpr std::size_t kPadding = 16;
constexpr int kMostCodes = 16;
constexpr int kMostLevels = 15;
constexpr int kMostFastLowBits = 10;  // of a wider plane, a weight can lie in three bytes
constexpr std::uint32_t kCommon = 3;  // exponents of a group that the plane tells
constexpr int kAround[kMostLevels + 1] = {-3, -4, 1, -5, 2, -6, -7, 0, 0, 0, 0, 0, 0, 0, 0, 0};

enum class WeightType : int { kBfloat16 = 0, kFloat16 = 1, kFloat8 = 2 };

enum class Outcome : int { kFine = 0, kTruncated = 1, kForeign = 2, kCorrupt = 3 };

struct Header {
  char magic[4];
  std::uint8_t kind;
  std::uint8_t base_bits;
  std::uint8_t type;
  std::uint8_t low_bits;
  std::uint8_t levels;
  std::uint8_t reserved;
  std::uint16_t group_size;
  std::uint32_t rows;
  std::uint32_t width;
  std::uint32_t spare;
  std::uint64_t bytes;
};
static_assert(sizeof(Header) == 32);

constexpr char kMagic[4] = {'S', 'X', 'R', '1'};
constexpr std::uint8_t kKindLevels = 1;

constexpr int kMostEdges = 7;

// Inner edges of the bins, in scales, from the lowest up.
struct Edges {
  int count;
  float in_scales[kMostEdges];
};

// A matrix of weights and its base.
struct Matrix {
  std::size_t rows, width, group_size;
  int base_bits;
  WeightType type;
  Edges edges;

  std::size_t size() const { return rows * width; }
  std::size_t chunks() const { return (size() + kChunk - 1) / kChunk; }
  std::size_t blocks() const { return (size() + kBlock - 1) / kBlock; }
  std::size_t groups() const { return rows * ((width + group_size - 1) / group_size); }
  std::size_t code_bytes(std::size_t count) const {
    return (count * static_cast<std::size_t>(base_bits) + 7) / 8;
  }
  std::size_t row_bytes() const {
    const std::size_t full = width / group_size;
    return full * code_bytes(group_size) + code_bytes(width % group_size);
  }
  // Whether every 32 weights lie in one group and their codes in whole bytes, one after another.
  bool is_even() const { return width % kChunk == 0 && group_size % (kChunk / 2) == 0; }
};

// Where the parts of a refinement begin.
struct Layout {
  std::size_t positions, exponents, plane, stream;

  Layout(const Matrix& matrix, int low_bits)
      : positions(sizeof(Header)),
        exponents(positions + 4 * (matrix.blocks() + 1)),
        plane(exponents + (matrix.base_bits ? 0 : (matrix.groups() + 7) / 8 * 8)),
        stream(plane + matrix.chunks() * 8 * static_cast<std::size_t>(low_bits)) {}
};

struct Bfloat16 {
  using Word = std::uint16_t;
  static constexpr int kMagnitudeBits = 15, kMantissaBits = 7;
  static constexpr std::uint32_t kInfinity = 0x7f80;  // this pattern and those above: not finite
  // The first pattern at or above a number that is not negative.
  static std::uint32_t ceiling(float x) { return (bits_of(x) + 0xffffu) >> 16; }
  static float value(std::uint32_t pattern) { return float_of(pattern << 16); }
};

struct Float16 {
  using Word = std::uint16_t;
  static constexpr int kMagnitudeBits = 15, kMantissaBits = 10;
  static constexpr std::uint32_t kInfinity = 0x7c00;
  static std::uint32_t ceiling(float x) {
    if (x < 0x1p-14f) return round_up(bits_of(x * 0x1p24f + 0x1p23f) - bits_of(0x1p23f), x);
    if (x >= 65504.0f) return x > 65504.0f ? 0x7c00 : 0x7bff;
    return ((bits_of(x) - (112u << 23) + 0x1fffu) >> 13) & 0x7fffu;
  }
  static float value(std::uint32_t pattern) {
    return from_float16(static_cast<std::uint16_t>(pattern));
  }
  static std::uint32_t round_up(std::uint32_t near, float x) {
    return value(near) < x ? near + 1 : near;
  }
};

struct Float8 {  // E4M3 without infinities
  using Word = std::uint8_t;
  static constexpr int kMagnitudeBits = 7, kMantissaBits = 3;
  static constexpr std::uint32_t kInfinity = 0x7f;
  static std::uint32_t ceiling(float x) {
    if (x < 0x1p-6f) return round_up(bits_of(x * 0x1p9f + 0x1p23f) - bits_of(0x1p23f), x);
    if (x >= 448.0f) return x > 448.0f ? 0x7f : 0x7e;
    return ((bits_of(x) - (120u << 23) + 0xfffffu) >> 20) & 0x7fu;
  }
  static float value(std::uint32_t pattern) {
    // As an FP32 pattern the magnitude is 2^120 too small, subnormals included.
    return float_of(pattern << 20) * 0x1p120f;
  }
  static std::uint32_t round_up(std::uint32_t near, float x) {
    return value(near) < x ? near + 1 : near;
  }
};

// What the codes of one group leave open. Entries are 16-bit patterns: magnitude and sign.
struct Ranges {
  std::uint16_t first[kMostCodes];  // where r is counted from
  std::uint8_t open[kMostCodes];    // 0xff if r can be wider than the plane
};

// The first pattern of every bin, and one behind the last bin.
template <typename Format>
inline void bin_starts(const Edges& edges, std::uint16_t scale, std::uint16_t* starts) {
  const float factor = from_float16(scale);
  starts[0] = 0;
  for (int edge = 0; edge < edges.count; ++edge) {
    starts[edge + 1] = static_cast<std::uint16_t>(Format::ceiling(edges.in_scales[edge] * factor));
  }
  starts[edges.count + 1] = std::uint16_t{1} << Format::kMagnitudeBits;
}

template <typename Format>
inline Ranges ranges_of(const Edges& edges, std::uint16_t scale, int low_bits) {
  std::uint16_t starts[kMostCodes / 2 + 1];
  bin_starts<Format>(edges, scale, starts);
  Ranges ranges{};
  const int bins = edges.count + 1;
  for (int bin = 0; bin < bins; ++bin) {
    const auto low = starts[bin];
    const auto high = static_cast<std::uint16_t>(starts[bin + 1] - 1);
    const auto span = static_cast<std::uint16_t>(high - low);
    const std::uint16_t first = bin == 0 ? high : low;
    for (int sign = 0; sign < 2; ++sign) {
      const int code = sign * bins + bin;
      ranges.first[code] = static_cast<std::uint16_t>(first | sign << Format::kMagnitudeBits);
      ranges.open[code] = span >> low_bits ? 0xff : 0;
    }
  }
  return ranges;
}

// Bits of the stream behind `position`, the lowest first. Reading looks at 9 bytes behind the
// position: kPadding covers that, as a position never passes the end by more than one.
struct BitReader {
  const std::uint8_t* stream;
  std::uint64_t position, end;

  std::uint64_t next(unsigned count) {
    const std::uint8_t* byte = stream + (position >> 3);
    const unsigned shift = position & 7;
    std::uint64_t word;
    std::memcpy(&word, byte, sizeof word);
    word = word >> shift | std::uint64_t{byte[8]} << 1 << (63 - shift);
    position += count;
    if (position > end) position = end + 1;  // and there it stays: never the end again
    return word;
  }
};

// Appends bits. There must be room for 9 bytes behind the position.
struct BitWriter {
  std::uint8_t* stream;
  std::uint64_t position;

  // Bits of `word` from `count` on must be zero.
  void append(std::uint64_t word, unsigned count) {
    std::uint8_t* byte = stream + (position >> 3);
    const unsigned shift = position & 7;
    const std::uint64_t low = (shift ? *byte & ((1u << shift) - 1) : 0u) | word << shift;
    std::memcpy(byte, &low, sizeof low);
    byte[8] = static_cast<std::uint8_t>(word >> 1 >> (63 - shift));
    position += count;
  }
};

// The levels of a chunk: bit i of plane k is bit k of the level of weight i. `rest`: the escapes.
struct Levels {
  std::uint64_t plane[4];
  std::uint64_t rest;

  std::uint32_t at(std::size_t place) const {
    std::uint64_t level = 0;
    for (unsigned k = 0; k < 4; ++k) level |= (plane[k] >> place & 1) << k;
    return static_cast<std::uint32_t>(level);
  }
};

// Reads the levels of the weights in `open`. deposit(bits, mask) puts the lowest bits of `bits` at
// the places of `mask`, as the instruction PDEP.
template <typename Deposit>
inline __attribute__((always_inline)) Levels read_levels(BitReader& reader, std::uint64_t open,
                                                         int most, Deposit deposit) {
  Levels levels{};
  std::uint64_t reached = open;
  for (int level = 1; reached && level <= most; ++level) {
    const auto count = static_cast<unsigned>(__builtin_popcountll(reached));
    reached = deposit(reader.next(count), reached);
    levels.plane[0] ^= reached;  // who reaches a level has reached all below
    if (level % 2 == 0) levels.plane[1] ^= reached;
    if (level % 4 == 0) levels.plane[2] ^= reached;
    if (level % 8 == 0) levels.plane[3] ^= reached;
  }
  levels.rest = reached;
  return levels;
}

inline std::uint32_t get_low(const std::uint8_t* plane, std::size_t place, int low_bits) {
  const std::size_t bit = place * static_cast<std::size_t>(low_bits);
  std::uint32_t word;
  std::memcpy(&word, plane + bit / 8, sizeof word);  // at most 3 bytes too far: in the padding
  return word >> (bit % 8) & ((1u << low_bits) - 1);
}

// ORs into a plane of zeros.
inline void put_low(std::uint8_t* plane, std::size_t place, int low_bits, std::uint32_t low) {
  const std::size_t bit = place * static_cast<std::size_t>(low_bits);
  std::uint32_t word;
  std::memcpy(&word, plane + bit / 8, sizeof word);
  word |= low << (bit % 8);
  std::memcpy(plane + bit / 8, &word, sizeof word);
}

struct Expansion {
  Matrix matrix;
  const std::uint8_t* codes;
  const std::uint16_t* scales;
  const std::uint8_t* refinement;
  Header header;
  void* out;
};

// Patterns to encode, and where their codes, scales and refinement go.
struct Compression {
  Matrix matrix;
  const void* weights;
  std::uint8_t* codes;
  std::uint16_t* scales;
  std::uint8_t* refinement;
  std::size_t capacity;
  int low_bits, levels;
};

Outcome expand_portable(const Expansion& expansion);
std::size_t compress_portable(const Compression& compression);
// The same without a base.
Outcome expand_exponents(const Expansion& expansion);
std::size_t compress_exponents(const Compression& compression);

bool has_bit_instructions();
// Only what `is_fast` allows.
Outcome expand_avx2(const Expansion& expansion);
std::size_t compress_avx2(const Compression& compression);
Outcome expand_exponents_avx2(const Expansion& expansion);

// Bits of a chunk at most: levels and escapes.
constexpr std::size_t kChunkBits = kChunk * (kMostLevels + 16);

inline std::uint32_t block_position(const std::uint8_t* refinement, std::size_t block) {
  std::uint32_t position;
  std::memcpy(&position, refinement + sizeof(Header) + 4 * block, sizeof position);
  return position;
}

inline void set_block_position(std::uint8_t* refinement, std::size_t block, std::uint64_t position) {
  const auto word = static_cast<std::uint32_t>(position);
  std::memcpy(refinement + sizeof(Header) + 4 * block, &word, sizeof word);
}

inline bool block_begins_wrong(const Expansion& expansion, std::size_t weight,
                               std::uint64_t position) {
  return weight % kBlock == 0 && position != block_position(expansion.refinement, weight / kBlock);
}

inline std::uint64_t deposit_bits(std::uint64_t bits, std::uint64_t mask) {
  std::uint64_t placed = 0;
  for (; mask; mask &= mask - 1, bits >>= 1) {
    if (bits & 1) placed |= mask & (~mask + 1);
  }
  return placed;
}

inline std::uint64_t extract_bits(std::uint64_t bits, std::uint64_t mask) {
  std::uint64_t gathered = 0;
  for (unsigned place = 0; mask; mask &= mask - 1, ++place) {
    if (bits & mask & (~mask + 1)) gathered |= std::uint64_t{1} << place;
  }
  return gathered;
}

inline unsigned count_bits(std::uint64_t bits) {
  return static_cast<unsigned>(__builtin_popcountll(bits));
}

// Writes levels: above[k] are the weights of a chunk that are open and whose level is above k. Returns
// the escapes. extract(bits, mask) gathers the bits at the places of `mask`, as the instruction PEXT.
template <typename Extract>
inline __attribute__((always_inline)) std::uint64_t write_levels(BitWriter& writer,
                                                                 std::uint64_t open,
                                                                 const std::uint64_t* above,
                                                                 int most, Extract extract) {
  std::uint64_t reached = open;
  for (int level = 0; reached && level < most; ++level) {
    writer.append(extract(above[level], reached), count_bits(reached));
    reached = above[level];
  }
  return reached;
}

// Whether a further chunk surely fits.
inline bool has_room(const Compression& compression, const Layout& layout, const BitWriter& writer) {
  const std::size_t end = layout.stream + (writer.position + kChunkBits) / 8;
  return end + kPadding <= compression.capacity;
}

// Completes a refinement whose bit stream ends at `position`: its size in bytes.
std::size_t finish(const Compression& compression, const Layout& layout, std::uint64_t position);

}  // namespace specter
