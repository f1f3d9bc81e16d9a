// Codes of 8, 4 and 2 bits times queries or weights as integers: 64 products an instruction, nothing unpacked to floats.
//
// Floats become sums of signed bytes ("digits"): x = unit * (d0 + 256 d1 + 65536 d2), exact to 2^-23 of the largest one,
// so that three byte products replace one of floats, without conversions. Two digits (2^-15) serve bf16 and fp16 models.
#pragma once
#include <array>

#include "lanes.h"

#if KV_DOTS
namespace kv {

constexpr int QUADS = BLOCK / 4;
constexpr int AHEAD = 4;    // tiles of keys that are fetched before they are needed
constexpr int WORDS = 512;  // words of a query: those of 512 channels, three digits of each and one place left free

// Where word x of a digit is: the digits of 16 values lie side by side.
KV_INLINE int64_t word_at(int64_t x, int digit) { return x / 4 * 16 + digit * 4 + x % 4; }

template <int NP>
struct Digits {
  static constexpr int32_t bias = NP == 3 ? 0x808080 : 0x8080;
  // a little below what the digits reach: rounding must not carry beyond the last one
  static constexpr float limit = NP == 3 ? 8355000.0f : 32600.0f;

  // The digits of 16 values already divided by their unit, as words [digit][4] of four neighbours; 16 words are written.
  static KV_INLINE void split(__m512 scaled, int32_t* to) {
    const __m512i plus = _mm512_set1_epi32(bias);
    const __m512i all = _mm512_xor_si512(_mm512_add_epi32(_mm512_cvtps_epi32(scaled), plus), plus);
#if defined(__AVX512VBMI__)
    alignas(64) static constexpr auto places = places_of();
    _mm512_storeu_si512(to, _mm512_permutexvar_epi8(_mm512_load_si512(places.data()), all));
#else
    KV_UNROLL for (int k = 0; k < NP; k++)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4 * k), _mm512_cvtepi32_epi8(_mm512_srli_epi32(all, 8 * k)));
#endif
  }

  static constexpr std::array<uint8_t, 64> places_of() {
    std::array<uint8_t, 64> found{};
    for (int i = 0; i < 64; i++) found[i] = static_cast<uint8_t>(i % 16 * 4 + i / 16);
    return found;
  }

  static KV_INLINE __m512 join(const __m512i* acc) {
    __m512 sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[1]), _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(acc[0]));
    if constexpr (NP == 3) sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[2]), _mm512_set1_ps(65536.0f), sum);
    return sum;
  }
};

// acc += products of 64 codes with four bytes that all lanes share. Written out, as GCC 12 otherwise copies and spills.
KV_INLINE void add_products(__m512i& acc, __m512i codes, const int32_t* four) {
#if defined(__GNUC__) && !defined(__clang__)
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(codes), "m"(*four));
#else
  acc = _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(*four));
#endif
}

// Codes of one set (the lowest, next ... of each byte) as bytes.
template <int BITS>
KV_INLINE __m512i codes_of(__m512i x, int set) {
  if constexpr (BITS == 8) return x;
  return _mm512_and_si512(_mm512_srli_epi32(x, set * BITS), _mm512_set1_epi8((1 << BITS) - 1));
}

// -- keys: lanes are tokens, a word is four neighbouring bytes of a row ------------------------------------------------

// Digits of Q queries [Q][stride] as words [Q][word_at(word * sets + set, digit)]; unit: [Q].
template <int NP, int Q>
void split_queries(const Side& s, const float* q, int64_t stride, int32_t* words, float* unit) {
  const int per = 8 / s.bits;
  alignas(16) static const uint8_t orders[3][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                                    {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15},
                                                    {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15}};
  const bool blocks = s.form == kGguf;
  const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(orders[blocks || per == 1 ? 0 : per / 2]));
  const bool halves = blocks && s.bits == 4;
  alignas(16) int32_t pairs[2][NP][4];
  for (int j = 0; j < Q; j++) {
    __m512 peak = _mm512_setzero_ps();
    for (int64_t c = 0; c < s.width; c += 16) {
      const __mmask16 m = s.width - c >= 16 ? 0xffff : (1u << (s.width - c)) - 1;
      peak = _mm512_max_ps(peak, _mm512_abs_ps(_mm512_maskz_loadu_ps(m, q + j * stride + c)));
    }
    const float largest = _mm512_reduce_max_ps(peak);
    unit[j] = largest / Digits<NP>::limit;
    const __m512 inverse = _mm512_set1_ps(largest > 1e-30f ? Digits<NP>::limit / largest : 0.0f);
    for (int64_t c = 0; c < s.width; c += 16) {
      const __mmask16 m = s.width - c >= 16 ? 0xffff : (1u << (s.width - c)) - 1;
      int32_t* to = words + j * WORDS + c;
      Digits<NP>::split(_mm512_mul_ps(_mm512_maskz_loadu_ps(m, q + j * stride + c), inverse), to);
      KV_UNROLL for (int k = 0; k < NP; k++) {
        const __m128i four = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<__m128i*>(to + 4 * k)), order);
        if (!halves) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 4 * k), four);
        else _mm_storeu_si128(reinterpret_cast<__m128i*>(pairs[c / 16 % 2][k]), four);
      }
      if (!halves || c / 16 % 2 == 0) continue;
      // ggml's 4-bit blocks pair value i with i + 16: each half of a block is every second word
      for (int k = 0; k < NP; k++)
        for (int i = 0; i < 8; i++) words[j * WORDS + word_at((c - 16) / 4 + i, k)] = pairs[i % 2][k][i / 2];
    }
  }
}

// Word w of 16 tokens: as it lies, or from two columns of 16-bit halves (ggml's blocks have odd numbers of words).
template <bool HALVES>
KV_INLINE __m512i word_of(const uint8_t* p) {
  const __m512i x = _mm512_loadu_si512(p);
  if constexpr (!HALVES) return x;
  const __m512i even = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                        20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(even, x);
}

// Products of T tiles with `count` words of a group, those of queries from `first` on, as floats in units.
template <int NP, int Q, int T, int BITS, bool HALVES>
KV_INLINE void word_products(const uint8_t* p, int64_t tile_bytes, int64_t first, int64_t count, const int32_t* words,
                             __m512i flip, __m512 (&out)[T][Q]) {
  constexpr int SETS = 8 / BITS;
  __m512i acc[T * Q * NP];
  each<T * Q * NP>([&](auto i) KV_LAMBDA { acc[i] = _mm512_setzero_si512(); });
  for (int64_t w = 0; w < count; w++) {
    __m512i x[T];
    each<T>([&](auto n) KV_LAMBDA {
      x[n] = word_of<HALVES>(p + n * tile_bytes + w * 64);
      if constexpr (HALVES && BITS == 8) x[n] = _mm512_xor_si512(x[n], flip);
      // the processor's own prefetcher stops at every page
      _mm_prefetch(p + (AHEAD + n) * tile_bytes + w * 64, _MM_HINT_T0);
    });
    each<SETS>([&](auto set) KV_LAMBDA {
      __m512i y[T];
      each<T>([&](auto n) KV_LAMBDA { y[n] = codes_of<BITS>(x[n], set); });
      const int32_t* four_of = words + word_at(first + w * SETS + set, 0);
      each<Q * NP>([&](auto i) KV_LAMBDA {
        const int32_t* four = four_of + i / NP * WORDS + i % NP * 4;
        each<T>([&](auto n) KV_LAMBDA { add_products(acc[n * Q * NP + i], y[n], four); });
      });
    });
  }
  each<T>([&](auto n) KV_LAMBDA { each<Q>([&](auto j) KV_LAMBDA { out[n][j] = Digits<NP>::join(acc + (n * Q + j) * NP); }); });
}

// Scores of T tiles; constant: null with scales by token, else [Q] what the minima of folded scales add.
template <int NP, int Q, int T, int BITS, bool HALVES>
KV_INLINE void dot_tiles(const Side& s, const Head& h, int64_t tile, const int32_t* words, const float* unit,
                         const float* sums, const float* constant, float* scores) {
  const int64_t groups = constant ? 1 : s.groups, bytes = row_bytes(s) * TILE;
  const int64_t span = constant ? s.width : s.group;
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
  const uint8_t* at = h.data + tile * bytes;
  alignas(64) float scale[TILE], low[TILE];
  for (int64_t g = 0; g < groups; g++) {
    const int64_t first = g * span, here = std::min(span, s.width - first), count = here * BITS / 32;
    const int64_t offset = HALVES ? (g * gguf_bytes(s) + 2 + 2 * s.lows) * TILE : first * BITS / 32 * 64;
    __m512 out[T][Q];
    word_products<NP, Q, T, BITS, HALVES>(at + offset, bytes, first / 4, count, words, flip, out);
    KV_UNROLL for (int n = 0; n < T; n++) {
      if (!constant) tile_scales(s, h, tile + n, g, scale, low);
      KV_UNROLL for (int j = 0; j < Q; j++) {
        float* to = scores + j * BLOCK + n * TILE;
        const __m512 u = _mm512_set1_ps(unit[j]);
        __m512 sum;
        if (constant) {
          sum = _mm512_fmadd_ps(out[n][j], u, _mm512_set1_ps(constant[j]));
        } else {
          sum = _mm512_mul_ps(_mm512_load_ps(low), _mm512_set1_ps(sums[j * groups + g]));
          sum = _mm512_fmadd_ps(_mm512_mul_ps(out[n][j], u), _mm512_load_ps(scale), sum);
          if (g) sum = _mm512_add_ps(sum, _mm512_loadu_ps(to));
        }
        _mm512_storeu_ps(to, sum);
      }
    }
  }
}

template <int NP, int Q, int BITS, bool HALVES>
void dots_keys_of(const Side& s, const Head& h, int64_t tile, int64_t tiles, const int32_t* words, const float* unit,
                  const float* sums, const float* constant, float* scores) {
  int64_t n = 0;
  for (; n + 2 <= tiles; n += 2)
    dot_tiles<NP, Q, 2, BITS, HALVES>(s, h, tile + n, words, unit, sums, constant, scores + n * TILE);
  if (n < tiles) dot_tiles<NP, Q, 1, BITS, HALVES>(s, h, tile + n, words, unit, sums, constant, scores + n * TILE);
}

template <int NP, int Q>
void dots_keys(const Side& s, const Head& h, int64_t tile, int64_t tiles, const int32_t* words, const float* unit,
               const float* sums, const float* constant, float* scores) {
  if (s.form == kGguf) {
    if (s.bits == 8) dots_keys_of<NP, Q, 8, true>(s, h, tile, tiles, words, unit, sums, constant, scores);
    else dots_keys_of<NP, Q, 4, true>(s, h, tile, tiles, words, unit, sums, constant, scores);
  } else if (s.bits == 8) {
    dots_keys_of<NP, Q, 8, false>(s, h, tile, tiles, words, unit, sums, constant, scores);
  } else if (s.bits == 4) {
    dots_keys_of<NP, Q, 4, false>(s, h, tile, tiles, words, unit, sums, constant, scores);
  } else {
    dots_keys_of<NP, Q, 2, false>(s, h, tile, tiles, words, unit, sums, constant, scores);
  }
}

// -- values: lanes are bytes of a row, a word is four tokens -------------------------------------------------------------

// Strips of up to 16 bytes that a group has, and all of them.
KV_INLINE int64_t group_bytes(const Side& s, int64_t g) {
  if (s.form == kGguf) return 4 * s.bits;
  return std::min(s.group, s.width - g * s.group) * s.bits / 8;
}

KV_INLINE int64_t strips_of(const Side& s) {
  int64_t found = 0;
  for (int64_t g = 0; g < s.groups; g++) found += (group_bytes(s, g) + 15) / 16;
  return found;
}

// The channel of each place [strip][set][16] of the sums, -1 where there is none.
inline void channels_of(const Side& s, int32_t* channel) {
  const int64_t sets = 8 / s.bits;
  for (int64_t g = 0; g < s.groups; g++)
    for (int64_t b = 0; b < group_bytes(s, g); b += 16)
      for (int64_t set = 0; set < sets; set++)
        for (int64_t i = 0; i < 16; i++) {
          const bool in = b + i < group_bytes(s, g);
          const int64_t c = s.form == kGguf ? b + i + 16 * set : (b + i) * sets + set;
          *channel++ = in ? static_cast<int32_t>(g * s.group + c) : -1;
        }
}

// Digits of weights[q][t] * scale[t] (scale null: 1) as words [q][word_at(quad, digit)] of four tokens; unit: [Q];
// peak: [Q]. Where `low` is given, lows[q * step] += the sum of weights times it.
template <int NP, int Q>
void split_weights(const float* weights, const float* scale, const float* low, float largest, const float* peak,
                   int64_t tiles, int32_t* words, float* unit, float* lows, int64_t step) {
  each<Q>([&](auto j) KV_LAMBDA {
    const float most = peak[j] * largest;
    unit[j] = most / Digits<NP>::limit;
    const __m512 inverse = _mm512_set1_ps(most > 1e-30f ? Digits<NP>::limit / most : 0.0f);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t n = 0; n < tiles; n++) {
      const __m512 w = _mm512_loadu_ps(weights + j * BLOCK + n * TILE);
      __m512 x = _mm512_mul_ps(w, inverse);
      if (scale) x = _mm512_mul_ps(x, _mm512_loadu_ps(scale + n * TILE));
      if (low) sum = _mm512_fmadd_ps(w, _mm512_loadu_ps(low + n * TILE), sum);
      Digits<NP>::split(x, words + j * BLOCK + n * 16);
    }
    if (low) lows[j * step] += _mm512_reduce_add_ps(sum);
  });
}

// out[set][16] of query j += the strip's values times weights; factor, least: null or those of channels [set][16].
template <int NP, int Q, int BITS>
KV_INLINE void strip_values(const uint8_t* p, int64_t quad_bytes, int64_t first, int64_t quads, __mmask16 lanes,
                            const int32_t* words, const float* unit, __m512i flip, const uint8_t* next,
                            const float* factor, float* out, int64_t stride) {
  constexpr int SETS = 8 / BITS, S = SETS < 2 ? SETS : 2;
  for (int set = 0; set < SETS; set += S) {
    __m512i acc[S * Q * NP];
    each<S * Q * NP>([&](auto i) KV_LAMBDA { acc[i] = _mm512_setzero_si512(); });
    for (int64_t n = first / 4; n < (first + quads) / 4; n++) {
      const int32_t* tile = words + n * 16;
      each<4>([&](auto f) KV_LAMBDA {
        const __m512i x = _mm512_xor_si512(_mm512_maskz_loadu_epi32(lanes, p + (n * 4 + f) * quad_bytes), flip);
        if (!set) _mm_prefetch(next + (n * 4 + f - first) * 64, _MM_HINT_T1);
        __m512i y[S];
        each<S>([&](auto i) KV_LAMBDA { y[i] = codes_of<BITS>(x, set + i); });
        each<Q * NP>([&](auto i) KV_LAMBDA {
          const int32_t* four = tile + i / NP * BLOCK + i % NP * 4 + f;
          each<S>([&](auto k) KV_LAMBDA { add_products(acc[k * Q * NP + i], y[k], four); });
        });
      });
    }
    each<S>([&](auto i) KV_LAMBDA {
      each<Q>([&](auto j) KV_LAMBDA {
        float* to = out + j * stride + (set + i) * 16;
        __m512 add = _mm512_mul_ps(Digits<NP>::join(acc + (i * Q + j) * NP), _mm512_set1_ps(unit[j]));
        if (factor) add = _mm512_mul_ps(add, _mm512_loadu_ps(factor + (set + i) * 16));
        _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), add));
      });
    });
  }
}

// All strips of group g, for quads [first, first + quads), whole tiles, of a block that starts at quad `at` of the part.
template <int NP, int Q>
void dots_values(const Side& s, const Head& h, int64_t g, int64_t at, int64_t first, int64_t quads, const int32_t* words,
                 const float* unit, const float* factor, float* out, int64_t stride) {
  const int64_t row = row_bytes(s), sets = 8 / s.bits, bytes = group_bytes(s, g);
  const int64_t before = s.form == kGguf ? g * gguf_bytes(s) + 2 + 2 * s.lows : g * s.group * s.bits / 8;
  const __m512i flip = _mm512_set1_epi8(s.form == kGguf && s.bits == 8 ? static_cast<char>(0x80) : 0);
  for (int64_t b = 0; b < bytes; b += 16) {
    const __mmask16 lanes = bytes - b >= 16 ? 0xffff : (1u << (bytes - b)) - 1;
    const uint8_t* p = h.data + at * row * 4 + (before + b) * 4;
    // what the next block will read, in the order in which it lies: this block's own reads jump from row to row
    const uint8_t* next = h.data + (at + QUADS) * row * 4 + ((before + b) / 16 * QUADS + first) * 64;
    switch (s.bits) {
      case 8: strip_values<NP, Q, 8>(p, row * 4, first, quads, lanes, words, unit, flip, next, factor, out, stride); break;
      case 4: strip_values<NP, Q, 4>(p, row * 4, first, quads, lanes, words, unit, flip, next, factor, out, stride); break;
      default: strip_values<NP, Q, 2>(p, row * 4, first, quads, lanes, words, unit, flip, next, factor, out, stride);
    }
    out += sets * 16;
    if (factor) factor += sets * 16;
  }
}

}  // namespace kv
#endif
