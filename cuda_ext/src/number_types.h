// Conversions between FP32 and the 16-bit types, rounding to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace specter {

inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float from_float16(std::uint16_t half) {
  const std::uint32_t sign = std::uint32_t{half & 0x8000u} << 16;
  const std::uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | (magnitude << 13));
  // As an FP32 pattern the magnitude is 2^112 too small, subnormals included.
  return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}

inline std::uint16_t to_float16(float value) {
  const std::uint32_t sign = (bits_of(value) >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits_of(value) & 0x7fffffffu;
  std::uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= bits_of(65520.0f)) {
    half = 0x7c00u;
  } else if (magnitude < bits_of(0x1p-14f)) {
    // Adding 1/2 leaves the sum's last bit worth 2^-24, the unit of FP16's subnormals.
    half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

inline std::uint16_t to_bfloat16(float value) {
  const std::uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace specter
