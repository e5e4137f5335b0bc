// Packed codes of a draft's weights, and decoding them.
//
// A row of `width` weights is cut into groups of `group_size`; the last group of a row may be
// shorter. Each group has one FP16 scale. Codes of `bits` bits fill the bytes of a group from the
// lowest bit up, and every group starts on a byte. A weight is table[code] * scale in FP32, rounded
// once to the output type; with 8 bits the code itself, a signed byte, stands for the table's entry.
#pragma once

#include <cstddef>
#include <cstdint>

namespace specter {

constexpr int kMostTableBits = 4;
constexpr int kTableSize = 1 << kMostTableBits;

enum class OutType : int { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

struct Coded {
  const std::uint8_t* codes;
  const std::uint16_t* scales;
  const float* table;  // kTableSize entries; null with 8 bits
  int bits;
  std::size_t rows, width, group_size;
  void* out;
  OutType out_type;

  std::size_t group_bytes(std::size_t count) const {
    return (count * static_cast<std::size_t>(bits) + 7) / 8;
  }
  std::size_t out_bytes(std::size_t count) const {
    return count * (out_type == OutType::kFloat32 ? 4 : 2);
  }
};

// One group: its codes, its scale and where its weights go.
struct Group {
  const std::uint8_t* codes;
  std::uint16_t scale;
  std::size_t count;
  std::byte* out;
};

// Calls decode(Group) for every group, row by row.
template <typename Decode>
void for_each_group(const Coded& coded, Decode decode) {
  const std::uint8_t* codes = coded.codes;
  const std::uint16_t* scale = coded.scales;
  auto* out = static_cast<std::byte*>(coded.out);
  for (std::size_t row = 0; row < coded.rows; ++row) {
    for (std::size_t start = 0; start < coded.width; start += coded.group_size) {
      const std::size_t left = coded.width - start;
      const std::size_t count = left < coded.group_size ? left : coded.group_size;
      decode(Group{codes, *scale++, count, out});
      codes += coded.group_bytes(count);
      out += coded.out_bytes(count);
    }
  }
}

void decode_portable(const Coded& coded);

// The last weights of a group, from `start` on: `values` is the group's scaled table.
template <typename Value>
void decode_rest(const Group& group, int bits, std::size_t start, const Value* values) {
  auto* out = reinterpret_cast<Value*>(group.out);
  const std::size_t width = static_cast<std::size_t>(bits);
  for (std::size_t place = start; place < group.count; ++place) {
    const std::size_t bit = place * width;
    const std::size_t last = (bit + width - 1) / 8;
    const std::size_t low = group.codes[bit / 8];
    const std::size_t high = group.codes[last];  // the same byte unless the code crosses into it
    out[place] = values[((low | high << 8) >> (bit % 8)) & ((std::size_t{1} << width) - 1)];
  }
}

// Whether this processor has what decode_avx2 uses.
bool has_avx2();
void decode_avx2(const Coded& coded);

}  // namespace specter
