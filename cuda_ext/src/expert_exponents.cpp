// Coded experts without a base, on any processor: common exponents and what is around them.
#include "expert_code.h"

namespace specter {
namespace {

template <typename Format>
struct Parts {
  static constexpr int kBits = 2 + Format::kMantissaBits + 1;  // of the plane
  static constexpr int kExponentBits = Format::kMagnitudeBits - Format::kMantissaBits;
  static constexpr std::uint32_t kMantissa = (1u << Format::kMantissaBits) - 1;
  static constexpr std::uint32_t kExponent = (1u << kExponentBits) - 1;

  static std::uint32_t exponent(std::uint32_t pattern) {
    return pattern >> Format::kMantissaBits & kExponent;
  }
  static std::uint32_t sign_mantissa(std::uint32_t pattern) {
    return pattern >> Format::kMagnitudeBits << Format::kMantissaBits | (pattern & kMantissa);
  }
  static std::uint32_t join(std::uint32_t sign_mantissa, std::uint32_t exponent) {
    return sign_mantissa >> Format::kMantissaBits << Format::kMagnitudeBits |
           (exponent & kExponent) << Format::kMantissaBits | (sign_mantissa & kMantissa);
  }
};

// The weights that begin in column `column` and share a group.
std::size_t group_count(const Matrix& matrix, std::size_t column) {
  const std::size_t left = matrix.width - column;
  return left < matrix.group_size ? left : matrix.group_size;
}

template <typename Format>
Outcome expand(const Expansion& expansion) {
  using Part = Parts<Format>;
  const Matrix& matrix = expansion.matrix;
  const Layout layout(matrix, Part::kBits);
  const std::uint8_t* plane = expansion.refinement + layout.plane;
  const std::uint8_t* next_top = expansion.refinement + layout.exponents;
  BitReader reader{expansion.refinement + layout.stream, 0,
                   block_position(expansion.refinement, matrix.blocks())};
  auto* out = static_cast<typename Format::Word*>(expansion.out);
  const std::size_t size = matrix.size();
  std::size_t column = 0, left = 0;
  std::uint32_t top = 0;
  for (std::size_t start = 0; start < size; start += kChunk) {
    if (block_begins_wrong(expansion, start, reader.position)) return Outcome::kCorrupt;
    const std::size_t count = size - start < kChunk ? size - start : kChunk;
    std::uint64_t open = 0;
    for (std::size_t place = 0; place < count; ++place) {
      const bool is_open = (get_low(plane, start + place, Part::kBits) & kCommon) == kCommon;
      open |= std::uint64_t{is_open} << place;
    }
    const Levels levels = read_levels(reader, open, expansion.header.levels, deposit_bits);
    for (std::size_t place = 0; place < count; ++place) {
      if (left == 0) {
        if (column == matrix.width) column = 0;
        left = group_count(matrix, column);
        column += left;
        top = *next_top++;
      }
      --left;
      const std::uint32_t told = get_low(plane, start + place, Part::kBits);
      std::uint32_t exponent = top - (told & kCommon);
      if (levels.rest >> place & 1) {
        exponent = static_cast<std::uint32_t>(reader.next(Part::kExponentBits));
      } else if (open >> place & 1) {
        exponent = top + static_cast<std::uint32_t>(kAround[levels.at(place)]);
      }
      out[start + place] = static_cast<typename Format::Word>(Part::join(told >> 2, exponent));
    }
  }
  return reader.position == reader.end ? Outcome::kFine : Outcome::kCorrupt;
}

// The highest of the three neighbouring exponents that most weights have; the lowest such if there
// are several. At least 2, so that the exponents are numbers.
template <typename Format>
std::uint32_t top_exponent(const typename Format::Word* weights, std::size_t count) {
  std::uint32_t numbers[Parts<Format>::kExponent + 1] = {};
  for (std::size_t place = 0; place < count; ++place) {
    ++numbers[Parts<Format>::exponent(weights[place])];
  }
  std::uint32_t best = 2, most = 0;
  for (std::uint32_t top = 2; top <= Parts<Format>::kExponent; ++top) {
    const std::uint32_t held = numbers[top] + numbers[top - 1] + numbers[top - 2];
    if (held > most) best = top, most = held;
  }
  return best;
}

// How often a weight goes on from level to level: the place of its exponent in kAround.
int level_of(std::uint32_t exponent, std::uint32_t top, int most) {
  const int difference = static_cast<int>(exponent) - static_cast<int>(top);
  for (int level = 0; level < most; ++level) {
    if (kAround[level] == difference) return level;
  }
  return most;
}

template <typename Format>
std::size_t compress(const Compression& compression) {
  using Part = Parts<Format>;
  const Matrix& matrix = compression.matrix;
  const Layout layout(matrix, Part::kBits);
  if (layout.stream + kPadding > compression.capacity) return 0;
  std::memset(compression.refinement + layout.exponents, 0, layout.stream - layout.exponents);
  std::uint8_t* plane = compression.refinement + layout.plane;
  std::uint8_t* next_top = compression.refinement + layout.exponents;
  BitWriter writer{compression.refinement + layout.stream, 0};
  const auto* weights = static_cast<const typename Format::Word*>(compression.weights);
  const std::size_t size = matrix.size();
  std::size_t column = 0, left = 0;
  std::uint32_t top = 0;
  for (std::size_t start = 0; start < size; start += kChunk) {
    if (!has_room(compression, layout, writer)) return 0;
    if (start % kBlock == 0) {
      set_block_position(compression.refinement, start / kBlock, writer.position);
    }
    const std::size_t count = size - start < kChunk ? size - start : kChunk;
    std::uint64_t above[kMostLevels] = {};
    std::uint64_t open = 0;
    for (std::size_t place = 0; place < count; ++place) {
      const std::size_t weight = start + place;
      if (left == 0) {
        if (column == matrix.width) column = 0;
        left = group_count(matrix, column);
        column += left;
        top = top_exponent<Format>(weights + weight, left);
        *next_top++ = static_cast<std::uint8_t>(top);
      }
      --left;
      const std::uint32_t exponent = Part::exponent(weights[weight]);
      std::uint32_t told = top - exponent;
      if (told >= kCommon) {
        told = kCommon;
        open |= std::uint64_t{1} << place;
        const int level = level_of(exponent, top, compression.levels);
        for (int k = 0; k < level; ++k) above[k] |= std::uint64_t{1} << place;
      }
      put_low(plane, weight, Part::kBits, told | Part::sign_mantissa(weights[weight]) << 2);
    }
    std::uint64_t escapes = write_levels(writer, open, above, compression.levels, extract_bits);
    for (; escapes; escapes &= escapes - 1) {
      const std::size_t weight = start + static_cast<unsigned>(__builtin_ctzll(escapes));
      writer.append(Part::exponent(weights[weight]), Part::kExponentBits);
    }
  }
  return finish(compression, layout, writer.position);
}

}  // namespace

Outcome expand_exponents(const Expansion& expansion) {
  switch (expansion.matrix.type) {
    case WeightType::kBfloat16: return expand<Bfloat16>(expansion);
    case WeightType::kFloat16: return expand<Float16>(expansion);
    case WeightType::kFloat8: return expand<Float8>(expansion);
  }
  return Outcome::kForeign;
}

std::size_t compress_exponents(const Compression& compression) {
  switch (compression.matrix.type) {
    case WeightType::kBfloat16: return compress<Bfloat16>(compression);
    case WeightType::kFloat16: return compress<Float16>(compression);
    case WeightType::kFloat8: return compress<Float8>(compression);
  }
  return 0;
}

}  // namespace specter
