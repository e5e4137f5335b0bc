// Decoding for any processor, and the C interface.
#include "decode_codes.h"

#include "export.h"
#include "number_types.h"

namespace specter {
namespace {

template <typename Value, Value (*Round)(float)>
void decode_table(const Coded& coded) {
  for_each_group(coded, [&](const Group& group) {
    const float scale = from_float16(group.scale);
    Value values[kTableSize];
    for (int level = 0; level < kTableSize; ++level) {
      values[level] = Round(coded.table[level] * scale);
    }
    decode_rest(group, coded.bits, 0, values);
  });
}

template <typename Value, Value (*Round)(float)>
void decode_bytes(const Coded& coded) {
  for_each_group(coded, [](const Group& group) {
    const float scale = from_float16(group.scale);
    auto* out = reinterpret_cast<Value*>(group.out);
    for (std::size_t place = 0; place < group.count; ++place) {
      const auto code = static_cast<std::int8_t>(group.codes[place]);
      out[place] = Round(static_cast<float>(code) * scale);
    }
  });
}

template <typename Value, Value (*Round)(float)>
void decode_as(const Coded& coded) {
  if (coded.bits == 8) {
    decode_bytes<Value, Round>(coded);
  } else {
    decode_table<Value, Round>(coded);
  }
}

float same(float value) { return value; }

}  // namespace

void decode_portable(const Coded& coded) {
  switch (coded.out_type) {
    case OutType::kFloat32: return decode_as<float, same>(coded);
    case OutType::kBfloat16: return decode_as<std::uint16_t, to_bfloat16>(coded);
    case OutType::kFloat16: return decode_as<std::uint16_t, to_float16>(coded);
  }
}

}  // namespace specter

// `portable` avoids instructions that not every processor of this kind has.
SPECTER_API void specter_decode_codes(const std::uint8_t* codes, const std::uint16_t* scales,
                                      const float* table, int bits, std::uint64_t rows,
                                      std::uint64_t width, std::uint64_t group_size, void* out,
                                      int out_type, int portable) {
  const specter::Coded coded{codes, scales,     table, bits, rows,
                             width, group_size, out,   static_cast<specter::OutType>(out_type)};
  if (!portable && specter::has_avx2()) {
    specter::decode_avx2(coded);
  } else {
    specter::decode_portable(coded);
  }
}
