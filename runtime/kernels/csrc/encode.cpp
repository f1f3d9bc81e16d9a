// Uniform integers written straight to where they stay: range, scale, codes and packing of a row in one pass.
//
// Step by step what runtime/formats/int.py does with tensors, in the same arithmetic, so that the bytes are the same.
#include <atomic>

#include "common.h"

namespace kv {
namespace {

constexpr int64_t kMostBytes = 4096;  // of a packed row
constexpr float kSlack = 1.0f / 1048576.0f;

// One buffer: element `e` of column `c` of row r lies at ((r / tile * columns + c) * tile + r % tile) * element + e.
struct Target {
  uint8_t* data;
  int64_t stride, tile, element;

  uint8_t* at(int64_t pair, int64_t row, int64_t column, int64_t columns) const {
    return data + pair * stride + ((row / tile * columns + column) * tile + row % tile) * element;
  }
};

struct Encoding {
  const uint8_t* x;
  int64_t type, batch_stride, head_stride, row_stride;  // bytes
  int64_t batch, heads, rows, width;
  int64_t bits, group, symmetric, scale_type, first;  // first: the row of the target that row 0 becomes
  Target codes, scale, low;                            // of scales, `element` is their size
};

// A float in a narrower type, rounded up (`up`) or to the nearest; its bits, and what they stand for.
KV_INLINE float narrowed(float x, int64_t type, bool up, uint8_t* to) {
  if (type == kF32) {
    std::memcpy(to, &x, 4);
    return x;
  }
  auto value = [&](uint16_t bits) { return type == kBf16 ? c10::detail::f32_from_bits(bits) : half_bits(bits); };
  uint16_t bits = type == kBf16 ? c10::detail::round_to_nearest_even(x) : c10::detail::fp16_ieee_from_fp32_value(x);
  // of positive floats the next larger one is the next integer
  if (up && value(bits) * (1.0f + kSlack) < x) bits++;
  std::memcpy(to, &bits, 2);
  return value(bits);
}

KV_INLINE float inverse_of(float scale) {
  return scale >= std::numeric_limits<float>::min() ? 1.0f / scale : 0.0f;
}

// One group's codes; false where its scale or minimum is not finite.
bool encode_group(const Encoding& e, const float* x, int64_t count, uint8_t* codes, uint8_t* scale, uint8_t* low) {
  float least = x[0], most = x[0];
  for (int64_t i = 1; i < count; i++) {
    least = std::min(least, x[i]);
    most = std::max(most, x[i]);
  }
  if (e.symmetric) {
    const float levels = static_cast<float>((1 << (e.bits - 1)) - 1), peak = std::max(most, -least);
    const float step = narrowed(most == least ? peak : peak / levels, e.scale_type, true, scale);
    const float inverse = inverse_of(step);
    for (int64_t i = 0; i < count; i++)
      codes[i] = static_cast<uint8_t>(std::min(std::max(std::nearbyint(x[i] * inverse), -levels), levels) + levels);
    return std::isfinite(step);
  }
  const float levels = static_cast<float>((1 << e.bits) - 1);
  const float base = narrowed(least, e.scale_type, false, low);
  const float step = narrowed(std::max((most - base) / levels, 0.0f), e.scale_type, true, scale);
  const float inverse = inverse_of(step);
  for (int64_t i = 0; i < count; i++)
    codes[i] = static_cast<uint8_t>(std::min(std::max(std::nearbyint((x[i] - base) * inverse), 0.0f), levels));
  return std::isfinite(step) && std::isfinite(base);
}

void pack_codes(const uint8_t* codes, int64_t width, int64_t bits, uint8_t* packed) {
  std::memset(packed, 0, (width * bits + 7) / 8);
  for (int64_t i = 0; i < width; i++) {
    const int64_t bit = i * bits;
    const uint32_t wide = static_cast<uint32_t>(codes[i]) << (bit % 8);
    packed[bit / 8] |= static_cast<uint8_t>(wide);
    if (bit % 8 + bits > 8) packed[bit / 8 + 1] |= static_cast<uint8_t>(wide >> 8);
  }
}

bool encode_row(const Encoding& e, int64_t pair, int64_t row) {
  float x[kMostBytes];
  uint8_t codes[kMostBytes], packed[kMostBytes];
  const uint8_t* from = e.x + pair / e.heads * e.batch_stride + pair % e.heads * e.head_stride + row * e.row_stride;
  for (int64_t c = 0; c < e.width; c++) x[c] = load_one(from, e.type, c);
  const int64_t groups = (e.width + e.group - 1) / e.group, to = e.first + row;
  bool fine = true;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t at = g * e.group;
    uint8_t* low = e.symmetric ? nullptr : e.low.at(pair, to, g, groups);
    fine &= encode_group(e, x + at, std::min(e.group, e.width - at), codes + at, e.scale.at(pair, to, g, groups), low);
  }
  const int64_t bytes = (e.width * e.bits + 7) / 8, element = e.codes.element;
  pack_codes(codes, e.width, e.bits, packed);
  for (int64_t c = 0; c < bytes / element; c++)
    std::memcpy(e.codes.at(pair, to, c, bytes / element), packed + c * element, element);
  return fine;
}

}  // namespace
}  // namespace kv

// 1 where all scales are finite, else 0: then what was written stands for nothing.
extern "C" int kvsim_encode(const kv::Encoding* encoding) {
  const kv::Encoding& e = *encoding;
  std::atomic<bool> fine{true};
  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(1, e.width));
  at::parallel_for(0, e.batch * e.heads * e.rows, grain, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++)
      if (!kv::encode_row(e, i / e.rows, i % e.rows)) fine = false;
  });
  return fine;
}
