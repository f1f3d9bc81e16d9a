// Rows that lie one after another: full precision and 8-bit floats with a scale a row. Lanes are channels.
#pragma once
#include "common.h"

namespace kv {

constexpr int AHEAD_ROWS = 16;  // rows that are fetched before they are needed

// 16 (N) values as floats from a pointer to the type's bytes; the powers of two that are left out are in `unit`.
template <int TYPE>
struct Load;

template <>
struct Load<kF32> {
  static constexpr int bytes = 4;
  static constexpr float unit = 1.0f;
  static KV_INLINE Vec full(const uint8_t* p) { return Vec::loadu(p); }
};

template <>
struct Load<kBf16> {
  static constexpr int bytes = 2;
  static constexpr float unit = 1.0f;
  static KV_INLINE Vec full(const uint8_t* p) { return load_type(p, kBf16); }
};

template <>
struct Load<kF16> {
  static constexpr int bytes = 2;
  static constexpr float unit = 1.0f;
  static KV_INLINE Vec full(const uint8_t* p) { return load_type(p, kF16); }
};

// The bits of an fp16 number 2^-8 times the e4m3 one: the exponent's bias is 15 instead of 7.
KV_INLINE uint16_t e4m3_as_half(uint8_t b) { return ((b & 0x80) << 8) | ((b & 0x7f) << 7); }

template <>
struct Load<kE4m3> {
  static constexpr int bytes = 1;
  static constexpr float unit = 256.0f;
  static KV_INLINE Vec full(const uint8_t* p) {
#if KV_AVX512
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    // sign-extended, shifted by 7: the copied signs leave bits 14 and up wrong, all but the top one masked away
    const __m256i bits = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    return _mm512_cvtph_ps(bits);
#else
    uint16_t bits[N];
    for (int i = 0; i < N; i++) bits[i] = e4m3_as_half(p[i]);
    return load_type(bits, kF16);
#endif
  }
};

template <>
struct Load<kE5m2> {
  static constexpr int bytes = 1;
  static constexpr float unit = 1.0f;
  static KV_INLINE Vec full(const uint8_t* p) {
    uint16_t bits[N];
#if KV_AVX512
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_cvtph_ps(_mm256_slli_epi16(wide, 8));
#endif
    for (int i = 0; i < N; i++) bits[i] = static_cast<uint16_t>(p[i] << 8);
    return load_type(bits, kF16);
  }
};

template <int TYPE>
KV_INLINE Vec load_some(const uint8_t* p, int64_t count) {
  if (count >= N) return Load<TYPE>::full(p);
  uint8_t buffer[N * 4] = {};
  std::memcpy(buffer, p, count * Load<TYPE>::bytes);
  return Load<TYPE>::full(buffer);
}

// out[i] = the sum of vector x[i].
template <int COUNT>
KV_INLINE void sums_of(const Vec* x, float* out) {
#if KV_AVX512
  if constexpr (COUNT > 2) {
    __m512 y[16], a[8], b[4];
    KV_UNROLL for (int i = 0; i < 16; i++) y[i] = i < COUNT ? static_cast<__m512>(x[i]) : _mm512_setzero_ps();
    KV_UNROLL for (int i = 0; i < 8; i++)
      a[i] = _mm512_add_ps(_mm512_unpacklo_ps(y[2 * i], y[2 * i + 1]), _mm512_unpackhi_ps(y[2 * i], y[2 * i + 1]));
    KV_UNROLL for (int i = 0; i < 4; i++)
      b[i] = _mm512_add_ps(_mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44), _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
    // b[i] holds in each 128-bit lane partial sums of y[4i..4i+3]
    const __m512 c = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
    const __m512 d = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
    _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1u << COUNT) - 1), all);
    return;
  }
#endif
  for (int i = 0; i < COUNT; i++) out[i] = sum_of(x[i]);
}

// scores[q][t] of Q queries for `count` rows from `p` on; queries lie [Q][stride].
template <int TYPE, int Q, int T>
KV_INLINE void row_scores(const uint8_t* p, int64_t width, const float* q, int64_t stride, float* sums) {
  Vec acc[T * Q];
  KV_UNROLL for (int i = 0; i < T * Q; i++) acc[i] = Vec(0.0f);
  const int64_t row = width * Load<TYPE>::bytes;
  int64_t c = 0;
  for (; c + N <= width; c += N) {
    Vec x[T];
    KV_UNROLL for (int t = 0; t < T; t++) {
      x[t] = Load<TYPE>::full(p + t * row + c * Load<TYPE>::bytes);
      __builtin_prefetch(p + (t + AHEAD_ROWS) * row + c * Load<TYPE>::bytes);
    }
    KV_UNROLL for (int j = 0; j < Q; j++) {
      const Vec y = Vec::loadu(q + j * stride + c);
      KV_UNROLL for (int t = 0; t < T; t++) acc[j * T + t] = at::vec::fmadd(x[t], y, acc[j * T + t]);
    }
  }
  if (c < width) {
    for (int t = 0; t < T; t++) {
      const Vec x = load_some<TYPE>(p + t * row + c * Load<TYPE>::bytes, width - c);
      for (int j = 0; j < Q; j++) acc[j * T + t] = at::vec::fmadd(x, Vec::loadu(q + j * stride + c, width - c), acc[j * T + t]);
    }
  }
  sums_of<T * Q>(acc, sums);
}

template <int TYPE, int Q>
void rows_keys(const Side& side, float times, const uint8_t* p, const uint8_t* scale, int64_t count, const float* q, int64_t stride,
               float* scores) {
  constexpr int T = N == 16 ? 4 : 2;
  const int64_t row = side.width * Load<TYPE>::bytes;
  const float shared = Load<TYPE>::unit * times;
  alignas(64) float sums[16];
  for (int64_t t = 0; t < count; t += T) {
    const int here = static_cast<int>(std::min<int64_t>(T, count - t));
    if (here == T) row_scores<TYPE, Q, T>(p + t * row, side.width, q, stride, sums);
    else
      for (int i = 0; i < here; i++) {
        float one[Q];
        row_scores<TYPE, Q, 1>(p + (t + i) * row, side.width, q, stride, one);
        for (int j = 0; j < Q; j++) sums[j * T + i] = one[j];
      }
    for (int i = 0; i < here; i++) {
      const float s = scale ? shared * load_one(scale, kF16, t + i) : shared;
      for (int j = 0; j < Q; j++) scores[j * BLOCK + t + i] = s * sums[j * T + i];
    }
  }
}

// out[q][c] += sum over rows of weights[q][t] * row[t][c].
template <int TYPE, int Q, int T>
KV_INLINE void add_rows(const uint8_t* p, int64_t width, const float (&w)[T][QUERIES], float* out, int64_t stride) {
  const int64_t row = width * Load<TYPE>::bytes;
  Vec weight[T][Q];
  KV_UNROLL for (int t = 0; t < T; t++) {
    KV_UNROLL for (int j = 0; j < Q; j++) weight[t][j] = Vec(w[t][j]);
  }
  for (int64_t c = 0; c < width; c += N) {
    const int64_t left = std::min<int64_t>(N, width - c);
    Vec x[T];
    KV_UNROLL for (int t = 0; t < T; t++) {
      x[t] = load_some<TYPE>(p + t * row + c * Load<TYPE>::bytes, left);
      __builtin_prefetch(p + (t + AHEAD_ROWS) * row + c * Load<TYPE>::bytes);
    }
    KV_UNROLL for (int j = 0; j < Q; j++) {
      // rows of `out` are padded to whole vectors
      Vec sum = Vec::loadu(out + j * stride + c);
      KV_UNROLL for (int t = 0; t < T; t++) sum = at::vec::fmadd(x[t], weight[t][j], sum);
      sum.store(out + j * stride + c);
    }
  }
}

template <int TYPE, int Q>
void rows_values(const Side& side, float times, const uint8_t* p, const uint8_t* scale, int64_t count, const float* weights, float* out,
                 int64_t stride) {
  constexpr int T = N == 16 ? 4 : 2;
  const int64_t row = side.width * Load<TYPE>::bytes;
  const float shared = Load<TYPE>::unit * times;
  float w[T][QUERIES], one[1][QUERIES];
  for (int64_t t = 0; t < count; t += T) {
    const int here = static_cast<int>(std::min<int64_t>(T, count - t));
    for (int i = 0; i < here; i++) {
      const float s = scale ? shared * load_one(scale, kF16, t + i) : shared;
      for (int j = 0; j < Q; j++) w[i][j] = s * weights[j * BLOCK + t + i];
    }
    if (here == T) add_rows<TYPE, Q, T>(p + t * row, side.width, w, out, stride);
    else
      for (int i = 0; i < here; i++) {
        std::memcpy(one[0], w[i], sizeof one[0]);
        add_rows<TYPE, Q, 1>(p + (t + i) * row, side.width, one, out, stride);
      }
  }
}

}  // namespace kv
