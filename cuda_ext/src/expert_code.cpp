// Coded experts on any processor, and the C interface.
#include "expert_code.h"

#include <cmath>

#include "export.h"

namespace specter {
namespace {

// What one code leaves open.
struct Place {
  std::uint16_t first;  // where r is counted from, with the sign
  bool open, down;
  bool signless;  // the sign is the lowest bit of r
};

// Walks over the groups of a matrix in order.
struct GroupWalk {
  explicit GroupWalk(const Matrix& of) : matrix(of) {}

  // Weights of the next group.
  std::size_t next() {
    if (column == matrix.width) column = 0;
    const std::size_t left = matrix.width - column;
    const std::size_t count = left < matrix.group_size ? left : matrix.group_size;
    column += count;
    return count;
  }

  const Matrix& matrix;
  std::size_t column = 0;
};

// Walks over the codes of a base of 2 to 4 bits.
template <typename Format>
class BinWalk {
 public:
  BinWalk(const Matrix& matrix, const std::uint8_t* codes, const std::uint16_t* scales,
          int low_bits)
      : groups_(matrix), codes_(codes), scale_(scales), low_bits_(low_bits) {}

  Place next() {
    if (place_ == count_) begin_group();
    const std::size_t bits = static_cast<std::size_t>(groups_.matrix.base_bits);
    const std::size_t bit = place_++ * bits;
    const std::uint32_t low = codes_[bit / 8];
    const std::uint32_t high = codes_[(bit + bits - 1) / 8];
    const std::uint32_t code = (low | high << 8) >> (bit % 8) & ((1u << bits) - 1);
    const bool down = (code & ((1u << (bits - 1)) - 1)) == 0;
    return {ranges_.first[code], ranges_.open[code] != 0, down, false};
  }

 private:
  void begin_group() {
    codes_ += groups_.matrix.code_bytes(count_);
    count_ = groups_.next();
    place_ = 0;
    ranges_ = ranges_of<Format>(groups_.matrix.edges, *scale_++, low_bits_);
  }

  GroupWalk groups_;
  const std::uint8_t* codes_;
  const std::uint16_t* scale_;
  int low_bits_;
  std::size_t place_ = 0, count_ = 0;
  Ranges ranges_{};
};

// Walks over the codes of an 8-bit base: signed levels of a grid. A weight lies half a step around
// its level, or a pattern beyond, as a level is found by a rounded division.
template <typename Format>
class StepWalk {
 public:
  StepWalk(const Matrix& matrix, const std::uint8_t* codes, const std::uint16_t* scales,
           int low_bits)
      : groups_(matrix), codes_(codes), scale_(scales), low_bits_(low_bits) {}

  Place next() {
    if (left_ == 0) {
      left_ = groups_.next();
      step_ = from_float16(*scale_++);
    }
    --left_;
    const int code = static_cast<std::int8_t>(*codes_++);
    const int level = code < 0 ? -code : code;
    const std::uint32_t behind = Format::ceiling((static_cast<float>(level) + 0.5f) * step_);
    if (level == 0) return {static_cast<std::uint16_t>(behind), true, true, true};
    const std::uint32_t start = Format::ceiling((static_cast<float>(level) - 0.5f) * step_);
    const std::uint32_t low = start ? start - 1 : 0;
    const bool open = level >= 127 || (behind - low) >> low_bits_ != 0;
    const std::uint32_t sign = code < 0 ? 1u << Format::kMagnitudeBits : 0;
    return {static_cast<std::uint16_t>(sign | low), open, false, false};
  }

 private:
  GroupWalk groups_;
  const std::uint8_t* codes_;
  const std::uint16_t* scale_;
  int low_bits_;
  std::size_t left_ = 0;
  float step_ = 0;
};

template <typename Format>
std::uint32_t pattern_at(const Place& place, std::uint32_t r) {
  if (!place.signless) return place.down ? place.first - r : place.first + r;
  const std::uint32_t magnitude = (place.first - (r >> 1)) & ((1u << Format::kMagnitudeBits) - 1);
  return magnitude | (r & 1) << Format::kMagnitudeBits;
}

// Undoes pattern_at; a pattern that does not lie in the code's range gives a huge number.
template <typename Format>
std::uint32_t refinement_of(const Place& place, std::uint32_t pattern) {
  const std::uint32_t mask = (1u << Format::kMagnitudeBits) - 1;
  const std::uint32_t magnitude = pattern & mask, first = place.first & mask;
  if (place.signless) {
    if (magnitude > first) return UINT32_MAX;
    return (first - magnitude) << 1 | pattern >> Format::kMagnitudeBits;
  }
  if ((pattern ^ place.first) >> Format::kMagnitudeBits) return UINT32_MAX;
  return place.down ? first - magnitude : magnitude - first;
}

template <typename Format, typename Walk>
Outcome expand(const Expansion& expansion) {
  using Word = typename Format::Word;
  const Matrix& matrix = expansion.matrix;
  const int low_bits = expansion.header.low_bits;
  const auto high_bits = static_cast<unsigned>(Format::kMagnitudeBits + 1 - low_bits);
  const Layout layout(matrix, low_bits);
  const std::uint8_t* plane = expansion.refinement + layout.plane;
  BitReader reader{expansion.refinement + layout.stream, 0,
                   block_position(expansion.refinement, matrix.blocks())};
  Walk walk(matrix, expansion.codes, expansion.scales, low_bits);
  auto* out = static_cast<Word*>(expansion.out);
  const std::size_t size = matrix.size();
  for (std::size_t start = 0; start < size; start += kChunk) {
    if (block_begins_wrong(expansion, start, reader.position)) return Outcome::kCorrupt;
    const std::size_t count = size - start < kChunk ? size - start : kChunk;
    Place places[kChunk];
    std::uint64_t open = 0;
    for (std::size_t place = 0; place < count; ++place) {
      places[place] = walk.next();
      open |= std::uint64_t{places[place].open} << place;
    }
    const Levels levels = read_levels(reader, open, expansion.header.levels, deposit_bits);
    for (std::size_t place = 0; place < count; ++place) {
      const std::uint32_t low = get_low(plane, start + place, low_bits);
      if (levels.rest >> place & 1) {
        const std::uint64_t high = reader.next(high_bits) & ((1u << high_bits) - 1);
        out[start + place] = static_cast<Word>(high << low_bits | low);
      } else {
        const std::uint32_t r = levels.at(place) << low_bits | low;
        out[start + place] = static_cast<Word>(pattern_at<Format>(places[place], r));
      }
    }
  }
  return reader.position == reader.end ? Outcome::kFine : Outcome::kCorrupt;
}

template <typename Format>
std::uint16_t scale_of(const typename Format::Word* weights, std::size_t count) {
  double sum = 0;
  for (std::size_t place = 0; place < count; ++place) {
    const std::uint32_t pattern = weights[place] & ((1u << Format::kMagnitudeBits) - 1);
    if (pattern >= Format::kInfinity) continue;
    const double value = Format::value(pattern);
    sum += value * value;
  }
  const double mean = std::sqrt(sum / static_cast<double>(count));
  return to_float16(static_cast<float>(mean < 65504.0 ? mean : 65504.0));
}

// Writes the codes and the scales of the base.
template <typename Format>
void write_base(const Compression& compression) {
  const Matrix& matrix = compression.matrix;
  const Edges& edges = matrix.edges;
  const auto* weights = static_cast<const typename Format::Word*>(compression.weights);
  std::uint8_t* codes = compression.codes;
  std::uint16_t* scale = compression.scales;
  std::memset(codes, 0, matrix.rows * matrix.row_bytes());
  for (std::size_t row = 0; row < matrix.rows; ++row) {
    for (std::size_t start = 0; start < matrix.width; start += matrix.group_size) {
      const std::size_t left = matrix.width - start;
      const std::size_t count = left < matrix.group_size ? left : matrix.group_size;
      *scale = scale_of<Format>(weights, count);
      std::uint16_t starts[kMostCodes / 2 + 1];
      bin_starts<Format>(edges, *scale++, starts);
      for (std::size_t place = 0; place < count; ++place) {
        const std::uint32_t pattern = weights[place] & ((1u << Format::kMagnitudeBits) - 1);
        unsigned code = weights[place] >> Format::kMagnitudeBits << (matrix.base_bits - 1);
        for (int edge = 1; edge <= edges.count; ++edge) code += pattern >= starts[edge];
        const std::size_t bit = place * static_cast<std::size_t>(matrix.base_bits);
        code <<= bit % 8;
        codes[bit / 8] = static_cast<std::uint8_t>(codes[bit / 8] | code);
        if (code >> 8) codes[bit / 8 + 1] = static_cast<std::uint8_t>(code >> 8);
      }
      weights += count;
      codes += matrix.code_bytes(count);
    }
  }
}

template <typename Format, typename Walk>
std::size_t compress(const Compression& compression) {
  const Matrix& matrix = compression.matrix;
  const int low_bits = compression.low_bits;
  const auto most = static_cast<std::uint32_t>(compression.levels);
  const Layout layout(matrix, low_bits);
  if (layout.stream + kPadding > compression.capacity) return 0;
  std::uint8_t* plane = compression.refinement + layout.plane;
  std::memset(plane, 0, layout.stream - layout.plane);
  BitWriter writer{compression.refinement + layout.stream, 0};
  Walk walk(matrix, compression.codes, compression.scales, low_bits);
  const auto* weights = static_cast<const typename Format::Word*>(compression.weights);
  const std::size_t size = matrix.size();
  for (std::size_t start = 0; start < size; start += kChunk) {
    if (!has_room(compression, layout, writer)) return 0;
    if (start % kBlock == 0) {
      set_block_position(compression.refinement, start / kBlock, writer.position);
    }
    const std::size_t count = size - start < kChunk ? size - start : kChunk;
    std::uint64_t above[kMostLevels] = {};
    std::uint64_t open = 0;
    for (std::size_t place = 0; place < count; ++place) {
      const Place known = walk.next();
      const std::uint32_t pattern = weights[start + place];
      const std::uint32_t r = refinement_of<Format>(known, pattern);
      const std::uint32_t level = r >> low_bits;
      const std::uint64_t bit = std::uint64_t{known.open} << place;
      open |= bit;
      for (std::uint32_t k = 0; k < level && k < most; ++k) above[k] |= bit;
      const std::uint32_t low = (level >= most ? pattern : r) & ((1u << low_bits) - 1);
      put_low(plane, start + place, low_bits, low);
    }
    std::uint64_t escapes = write_levels(writer, open, above, compression.levels, extract_bits);
    for (; escapes; escapes &= escapes - 1) {
      const std::uint32_t pattern = weights[start + static_cast<unsigned>(__builtin_ctzll(escapes))];
      writer.append(pattern >> low_bits,
                    static_cast<unsigned>(Format::kMagnitudeBits + 1 - low_bits));
    }
  }
  return finish(compression, layout, writer.position);
}

template <typename Format>
Outcome expand_type(const Expansion& expansion) {
  if (expansion.matrix.base_bits == 8) return expand<Format, StepWalk<Format>>(expansion);
  return expand<Format, BinWalk<Format>>(expansion);
}

template <typename Format>
std::size_t compress_type(const Compression& compression) {
  if (compression.matrix.base_bits == 8) return compress<Format, StepWalk<Format>>(compression);
  write_base<Format>(compression);
  return compress<Format, BinWalk<Format>>(compression);
}

}  // namespace

Outcome expand_portable(const Expansion& expansion) {
  switch (expansion.matrix.type) {
    case WeightType::kBfloat16: return expand_type<Bfloat16>(expansion);
    case WeightType::kFloat16: return expand_type<Float16>(expansion);
    case WeightType::kFloat8: return expand_type<Float8>(expansion);
  }
  return Outcome::kForeign;
}

std::size_t compress_portable(const Compression& compression) {
  switch (compression.matrix.type) {
    case WeightType::kBfloat16: return compress_type<Bfloat16>(compression);
    case WeightType::kFloat16: return compress_type<Float16>(compression);
    case WeightType::kFloat8: return compress_type<Float8>(compression);
  }
  return 0;
}

std::size_t finish(const Compression& compression, const Layout& layout, std::uint64_t position) {
  const Matrix& matrix = compression.matrix;
  const std::size_t end = layout.stream + (position + 7) / 8;
  const std::size_t bytes = (end + kPadding + 7) / 8 * 8;
  if (bytes > compression.capacity || position > UINT32_MAX) return 0;
  std::memset(compression.refinement + end, 0, bytes - end);
  set_block_position(compression.refinement, matrix.blocks(), position);
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.kind = kKindLevels;
  header.base_bits = static_cast<std::uint8_t>(matrix.base_bits);
  header.type = static_cast<std::uint8_t>(matrix.type);
  header.low_bits = static_cast<std::uint8_t>(compression.low_bits);
  header.levels = static_cast<std::uint8_t>(compression.levels);
  header.group_size = static_cast<std::uint16_t>(matrix.group_size);
  header.rows = static_cast<std::uint32_t>(matrix.rows);
  header.width = static_cast<std::uint32_t>(matrix.width);
  header.bytes = bytes;
  std::memcpy(compression.refinement, &header, sizeof header);
  return bytes;
}

namespace {

int magnitude_bits(WeightType type) { return type == WeightType::kFloat8 ? 7 : 15; }

// Bits of the plane without a base: the place of the exponent, mantissa and sign.
int exponent_plane_bits(WeightType type) {
  switch (type) {
    case WeightType::kBfloat16: return 2 + Bfloat16::kMantissaBits + 1;
    case WeightType::kFloat16: return 2 + Float16::kMantissaBits + 1;
    default: return 2 + Float8::kMantissaBits + 1;
  }
}

bool has_plane(const Header& header, const Matrix& matrix) {
  if (matrix.base_bits == 0) return header.low_bits == exponent_plane_bits(matrix.type);
  return header.low_bits >= 1 && header.low_bits <= magnitude_bits(matrix.type);
}

bool fits(const Header& header, const Matrix& matrix) {
  return std::memcmp(header.magic, kMagic, sizeof kMagic) == 0 && header.kind == kKindLevels &&
         header.base_bits == matrix.base_bits && header.type == static_cast<int>(matrix.type) &&
         header.group_size == matrix.group_size && header.rows == matrix.rows &&
         header.width == matrix.width;
}

// Whether every part of the refinement lies inside its bytes.
Outcome check(const Header& header, const Matrix& matrix, const std::uint8_t* refinement,
              std::size_t bytes) {
  if (bytes < sizeof(Header)) return Outcome::kTruncated;
  if (!fits(header, matrix)) return Outcome::kForeign;
  if (!has_plane(header, matrix)) return Outcome::kCorrupt;
  if (header.levels < 1 || header.levels > kMostLevels) return Outcome::kCorrupt;
  if (header.bytes > bytes) return Outcome::kTruncated;
  const Layout layout(matrix, header.low_bits);
  if (layout.stream + kPadding > header.bytes) return Outcome::kCorrupt;
  const std::size_t room = header.bytes - layout.stream - kPadding;
  const std::size_t stream_bits = block_position(refinement, matrix.blocks());
  return (stream_bits + 7) / 8 <= room ? Outcome::kFine : Outcome::kCorrupt;
}

Matrix matrix_of(int type, std::uint64_t rows, std::uint64_t width, int base_bits,
                 std::uint64_t group_size, const float* edges) {
  Matrix matrix{rows, width, group_size, base_bits, static_cast<WeightType>(type), {}};
  matrix.edges.count = base_bits >= 2 && base_bits <= 4 ? (1 << (base_bits - 1)) - 1 : 0;
  for (int edge = 0; edge < matrix.edges.count; ++edge) matrix.edges.in_scales[edge] = edges[edge];
  return matrix;
}

bool is_fast(const Matrix& matrix, int low_bits, int portable) {
  return !portable && has_bit_instructions() && matrix.is_even() && matrix.base_bits != 8 &&
         matrix.type != WeightType::kFloat8 && low_bits <= kMostFastLowBits;
}

Outcome expand_any(const Expansion& expansion, int portable) {
  const bool fast = is_fast(expansion.matrix, expansion.header.low_bits, portable);
  if (expansion.matrix.base_bits == 0) {
    return fast ? expand_exponents_avx2(expansion) : expand_exponents(expansion);
  }
  return fast ? expand_avx2(expansion) : expand_portable(expansion);
}

}  // namespace
}  // namespace specter

SPECTER_API int specter_expand(int type, std::uint64_t rows, std::uint64_t width, int base_bits,
                               std::uint64_t group_size, const float* edges,
                               const std::uint8_t* codes, const std::uint16_t* scales,
                               const std::uint8_t* refinement, std::uint64_t bytes, void* out,
                               int portable) {
  using namespace specter;
  Expansion expansion{matrix_of(type, rows, width, base_bits, group_size, edges),
                      codes,
                      scales,
                      refinement,
                      {},
                      out};
  if (bytes >= sizeof(Header)) std::memcpy(&expansion.header, refinement, sizeof(Header));
  const Outcome outcome = check(expansion.header, expansion.matrix, refinement, bytes);
  if (outcome != Outcome::kFine) return static_cast<int>(outcome);
  return static_cast<int>(expand_any(expansion, portable));
}

// Returns the bytes of the refinement, or 0 if they are more than `capacity`. A base of 8 bits must
// be there already, others are written.
SPECTER_API std::uint64_t specter_compress(int type, std::uint64_t rows, std::uint64_t width,
                                           int base_bits, std::uint64_t group_size,
                                           const float* edges, const void* weights, int low_bits,
                                           int levels, std::uint8_t* codes, std::uint16_t* scales,
                                           std::uint8_t* refinement, std::uint64_t capacity,
                                           int portable) {
  using namespace specter;
  const Compression compression{
      matrix_of(type, rows, width, base_bits, group_size, edges),
      weights,
      codes,
      scales,
      refinement,
      capacity,
      low_bits,
      levels};
  if (base_bits == 0) return compress_exponents(compression);
  const bool fast = is_fast(compression.matrix, low_bits, portable);
  return fast ? compress_avx2(compression) : compress_portable(compression);
}
