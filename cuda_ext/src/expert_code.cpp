// Coded experts on any processor, and the C interface.
#include "expert_code.h"

#include <cmath>

#include "export.h"

namespace specter {
namespace {

// Walks the weights of a matrix in order and knows the group and the code of each.
template <typename Format>
class Walk {
 public:
  Walk(const Matrix& matrix, const std::uint8_t* codes, const std::uint16_t* scales, int low_bits)
      : matrix_(matrix),
        codes_(codes),
        scale_(scales),
        low_bits_(low_bits) {}

  // The next weight's code; `ranges` are those of its group.
  unsigned next() {
    if (place_ == count_) begin_group();
    const std::size_t bits = static_cast<std::size_t>(matrix_.base_bits);
    const std::size_t bit = place_++ * bits;
    const std::uint32_t low = codes_[bit / 8];
    const std::uint32_t high = codes_[(bit + bits - 1) / 8];
    return (low | high << 8) >> (bit % 8) & ((1u << bits) - 1);
  }

  Ranges ranges;

 private:
  void begin_group() {
    codes_ += matrix_.code_bytes(count_);
    if (column_ == matrix_.width) column_ = 0;
    const std::size_t left = matrix_.width - column_;
    count_ = left < matrix_.group_size ? left : matrix_.group_size;
    column_ += count_;
    place_ = 0;
    ranges = ranges_of<Format>(matrix_.edges, *scale_++, low_bits_);
  }

  const Matrix& matrix_;
  const std::uint8_t* codes_;
  const std::uint16_t* scale_;
  int low_bits_;
  std::size_t column_ = 0, place_ = 0, count_ = 0;
};

std::uint64_t deposit(std::uint64_t bits, std::uint64_t mask) {
  std::uint64_t placed = 0;
  for (; mask; mask &= mask - 1, bits >>= 1) {
    if (bits & 1) placed |= mask & (~mask + 1);
  }
  return placed;
}

std::uint64_t extract(std::uint64_t bits, std::uint64_t mask) {
  std::uint64_t gathered = 0;
  for (unsigned place = 0; mask; mask &= mask - 1, ++place) {
    if (bits & mask & (~mask + 1)) gathered |= std::uint64_t{1} << place;
  }
  return gathered;
}

bool block_begins_wrong(const Expansion& expansion, std::size_t weight, std::uint64_t position) {
  return weight % kBlock == 0 && position != block_position(expansion.refinement, weight / kBlock);
}

template <typename Format>
Outcome expand(const Expansion& expansion) {
  using Word = typename Format::Word;
  const Matrix& matrix = expansion.matrix;
  const int low_bits = expansion.header.low_bits;
  const unsigned bin_mask = (1u << (matrix.base_bits - 1)) - 1;
  const Layout layout(matrix, low_bits);
  const std::uint8_t* plane = expansion.refinement + layout.plane;
  BitReader reader{expansion.refinement + layout.stream, 0,
                   block_position(expansion.refinement, matrix.blocks())};
  Walk<Format> walk(matrix, expansion.codes, expansion.scales, low_bits);
  auto* out = static_cast<Word*>(expansion.out);
  const std::size_t size = matrix.size();
  for (std::size_t start = 0; start < size; start += kChunk) {
    if (block_begins_wrong(expansion, start, reader.position)) return Outcome::kCorrupt;
    const std::size_t count = size - start < kChunk ? size - start : kChunk;
    std::uint16_t first[kChunk];
    std::uint64_t open = 0, down = 0;
    for (std::size_t place = 0; place < count; ++place) {
      const unsigned code = walk.next();
      first[place] = walk.ranges.first[code];
      if (walk.ranges.open[code]) open |= std::uint64_t{1} << place;
      if (!(code & bin_mask)) down |= std::uint64_t{1} << place;
    }
    const Levels levels = read_levels(reader, open, expansion.header.levels, deposit);
    for (std::size_t place = 0; place < count; ++place) {
      std::uint32_t r = get_low(plane, start + place, low_bits);
      for (int k = 0; k < 4; ++k) {
        r += static_cast<std::uint32_t>(levels.plane[k] >> place & 1) << (k + low_bits);
      }
      if (levels.rest >> place & 1) {
        const auto high_bits = static_cast<unsigned>(Format::kMagnitudeBits - low_bits);
        const auto high = reader.next(high_bits) & ((1u << high_bits) - 1);
        const std::uint32_t low = get_low(plane, start + place, low_bits);
        const std::uint32_t sign = first[place] & (1u << Format::kMagnitudeBits);
        out[start + place] = static_cast<Word>(sign | high << low_bits | low);
      } else {
        out[start + place] =
            static_cast<Word>(down >> place & 1 ? first[place] - r : first[place] + r);
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

template <typename Format>
std::size_t compress(const Compression& compression) {
  write_base<Format>(compression);
  const Matrix& matrix = compression.matrix;
  const int low_bits = compression.low_bits;
  const unsigned bin_mask = (1u << (matrix.base_bits - 1)) - 1;
  const Layout layout(matrix, low_bits);
  if (layout.stream + kPadding > compression.capacity) return 0;
  std::uint8_t* plane = compression.refinement + layout.plane;
  std::memset(plane, 0, layout.stream - layout.plane);
  BitWriter writer{compression.refinement + layout.stream, 0};
  Walk<Format> walk(matrix, compression.codes, compression.scales, low_bits);
  const auto* weights = static_cast<const typename Format::Word*>(compression.weights);
  const std::size_t size = matrix.size();
  for (std::size_t start = 0; start < size; start += kChunk) {
    if (layout.stream + (writer.position + kChunkBits) / 8 + kPadding > compression.capacity) {
      return 0;
    }
    if (start % kBlock == 0) {
      set_block_position(compression.refinement, start / kBlock, writer.position);
    }
    const std::size_t count = size - start < kChunk ? size - start : kChunk;
    std::uint32_t level[kChunk];
    std::uint64_t reached = 0;
    for (std::size_t place = 0; place < count; ++place) {
      const unsigned code = walk.next();
      const std::uint32_t mask = (1u << Format::kMagnitudeBits) - 1;
      const std::uint32_t pattern = weights[start + place] & mask;
      const std::uint32_t first = walk.ranges.first[code] & mask;
      const std::uint32_t r = code & bin_mask ? pattern - first : first - pattern;
      level[place] = r >> low_bits;
      if (walk.ranges.open[code]) reached |= std::uint64_t{1} << place;
      const bool escapes = level[place] >= static_cast<std::uint32_t>(compression.levels);
      const std::uint32_t low = (escapes ? pattern : r) & ((1u << low_bits) - 1);
      put_low(plane, start + place, low_bits, low);
    }
    for (int most = 0; reached && most < compression.levels; ++most) {
      std::uint64_t goes_on = 0;
      for (std::size_t place = 0; place < count; ++place) {
        if (level[place] > static_cast<std::uint32_t>(most)) goes_on |= std::uint64_t{1} << place;
      }
      goes_on &= reached;
      writer.append(extract(goes_on, reached),
                    static_cast<unsigned>(__builtin_popcountll(reached)));
      reached = goes_on;
    }
    for (; reached; reached &= reached - 1) {
      const auto place = static_cast<std::size_t>(__builtin_ctzll(reached));
      const std::uint32_t pattern =
          weights[start + place] & ((1u << Format::kMagnitudeBits) - 1);
      writer.append(pattern >> low_bits, static_cast<unsigned>(Format::kMagnitudeBits - low_bits));
    }
  }
  return finish(compression, layout, writer.position);
}

}  // namespace

Outcome expand_portable(const Expansion& expansion) {
  switch (expansion.matrix.type) {
    case WeightType::kBfloat16: return expand<Bfloat16>(expansion);
    case WeightType::kFloat16: return expand<Float16>(expansion);
    case WeightType::kFloat8: return expand<Float8>(expansion);
  }
  return Outcome::kForeign;
}

std::size_t compress_portable(const Compression& compression) {
  switch (compression.matrix.type) {
    case WeightType::kBfloat16: return compress<Bfloat16>(compression);
    case WeightType::kFloat16: return compress<Float16>(compression);
    case WeightType::kFloat8: return compress<Float8>(compression);
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
  const int most = magnitude_bits(matrix.type);
  if (header.low_bits < 1 || header.low_bits > most || header.low_bits > 15) {
    return Outcome::kCorrupt;
  }
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
  matrix.edges.count = (1 << (base_bits - 1)) - 1;
  for (int edge = 0; edge < matrix.edges.count; ++edge) matrix.edges.in_scales[edge] = edges[edge];
  return matrix;
}

bool is_fast(const Matrix& matrix, int low_bits, int portable) {
  return !portable && has_bit_instructions() && matrix.is_even() &&
         matrix.type != WeightType::kFloat8 && low_bits <= kMostFastLowBits;
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
  const bool fast = is_fast(expansion.matrix, expansion.header.low_bits, portable);
  return static_cast<int>(fast ? expand_avx2(expansion) : expand_portable(expansion));
}

// Returns the bytes of the refinement, or 0 if they are more than `capacity`.
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
  const bool fast = is_fast(compression.matrix, low_bits, portable);
  return fast ? compress_avx2(compression) : compress_portable(compression);
}
