// Encoded rows in tiles of 16 tokens, lanes are tokens: any bit width, any table, every machine that has vectors.
#pragma once
#include "common.h"

namespace kv {

using Ints = at::vec::Vectorized<int32_t>;
constexpr int STEPS = TILE / N;  // vectors of a tile

// One head's encoded rows of one part.
struct Head {
  const uint8_t *data, *scale, *low;
  int64_t rows, head;
};

KV_INLINE int64_t gguf_bytes(const Side& s) { return 2 + 2 * s.lows + 4 * s.bits; }

KV_INLINE int64_t row_bytes(const Side& s) {
  return s.form == kGguf ? s.width / 32 * gguf_bytes(s) : (s.width * s.bits + 7) / 8;
}

// The value of a code of zero, in scales, where no minimum is stored.
KV_INLINE float offset_of(const Side& s) {
  if (s.form == kGguf) return s.lows ? 0.0f : s.bits == 8 ? -128.0f : -8.0f;
  return s.symmetric ? -static_cast<float>((1 << (s.bits - 1)) - 1) : 0.0f;
}

// Scale and minimum of group g for the 16 tokens of a tile.
KV_INLINE void tile_scales(const Side& s, const Head& h, int64_t tile, int64_t g, float* scale, float* low) {
  const uint8_t *from = nullptr, *least = nullptr;
  int64_t type = s.scale_type;
  if (s.form == kGguf) {
    from = h.data + tile * TILE * row_bytes(s) + g * gguf_bytes(s) * TILE;
    least = s.lows ? from + 2 * TILE : nullptr;
    type = kF16;
  } else if (h.scale) {
    const int64_t at = (tile * s.groups + g) * TILE * bytes_of(type);
    from = h.scale + at;
    least = h.low ? h.low + at : nullptr;
  }
  const Vec offset(offset_of(s));
  for (int i = 0; i < TILE; i += N) {
    const Vec x = from ? load_type(from + i * bytes_of(type), type) : Vec(1.0f);
    x.store(scale + i);
    (least ? load_type(least + i * bytes_of(type), type) : offset * x).store(low + i);
  }
}

// Scales and minima of group g for tokens [0, 16 * tiles) of a block, 0 behind the last of `rows`.
inline float block_scales(const Side& s, const Head& h, int64_t tile, int64_t tiles, int64_t g, float* scale, float* low) {
  Vec largest(0.0f);
  for (int64_t n = 0; n < tiles; n++) {
    float *to = scale + n * TILE, *least = low + n * TILE;
    if (s.form == kGguf && s.dots) {
      const uint8_t* column = h.data + (tile + n) * TILE * row_bytes(s) + g * gguf_bytes(s) * 4;
      for (int t = 0; t < TILE; t++) {
        // a quad of tokens is row_bytes * 4 bytes, each column of it 4
        const uint8_t* at = column + t / 4 * row_bytes(s) * 4 + t % 4;
        to[t] = half_bits(static_cast<uint16_t>(at[0] | at[4] << 8));
        least[t] = s.lows ? half_bits(static_cast<uint16_t>(at[8] | at[12] << 8)) : offset_of(s) * to[t];
      }
    } else {
      tile_scales(s, h, tile + n, g, to, least);
    }
    const int64_t left = h.rows - (tile + n) * TILE;
    for (int64_t t = std::max<int64_t>(left, 0); t < TILE; t++) to[t] = least[t] = 0.0f;
    for (int t = 0; t < TILE; t += N) largest = larger(largest, Vec::loadu(to + t).abs());
  }
  return max_of(largest);
}

// Codes of one channel for N of a tile's tokens, as integers.
struct Fetch {
  const uint8_t* column;
  int shift, spill;  // bits that the next word adds at this place, or 0
  bool half;
  int mask, flip;

  KV_INLINE Fetch(const Side& s, const uint8_t* tile, int64_t channel) : spill(0), half(s.form == kGguf), flip(0) {
    mask = (1 << s.bits) - 1;
    if (half) {
      const int64_t block = channel / 32, in = channel % 32;
      const int64_t byte = block * gguf_bytes(s) + 2 + 2 * s.lows + (s.bits == 8 ? in : in % 16);
      column = tile + byte / 2 * 2 * TILE;
      shift = byte % 2 * 8 + (s.bits == 4 && in >= 16 ? 4 : 0);
      flip = s.bits == 8 ? 0x80 : 0;
      return;
    }
    const int64_t bit = channel * s.bits;
    column = tile + bit / 32 * 4 * TILE;
    shift = bit % 32;
    spill = shift + s.bits > 32 ? 32 - shift : 0;
  }

  KV_INLINE Ints operator()(int lane) const {
    Ints x;
    if (half) {
      int32_t wide[N];
      uint16_t narrow[N];
      std::memcpy(narrow, column + lane * 2, sizeof narrow);
      for (int i = 0; i < N; i++) wide[i] = narrow[i];
      x = Ints::loadu(wide);
    } else {
      x = Ints::loadu(column + lane * 4);
    }
    x = x >> Ints(shift);
    if (spill) {
      x = x & Ints((1 << spill) - 1);
      x = x | (Ints::loadu(column + 4 * TILE + lane * 4) << Ints(spill));
    }
    x = x & Ints(mask);
    return flip ? x ^ Ints(flip) : x;
  }
};

KV_INLINE Vec look_up(const float* table, const Ints& codes) {
#if KV_AVX512
  return _mm512_permutexvar_ps(codes, _mm512_loadu_ps(table));
#else
  int32_t at[N];
  float found[N];
  codes.store(at);
  for (int i = 0; i < N; i++) found[i] = table[at[i]];
  return Vec::loadu(found);
#endif
}

KV_INLINE const float* table_of(const Side& s, int64_t head, int64_t channel) {
  return s.form == kTable ? s.table + head * s.table_head + channel * s.table_channel : nullptr;
}

KV_INLINE Vec value_of(const float* table, const Ints& codes) {
  return table ? look_up(table, codes) : at::vec::convert<float>(codes);
}

// One tile: out[q][lane] = sum over channels [first, last) of q[channel] * value.
template <int Q>
KV_INLINE void lane_products(const Side& s, const Head& h, int64_t tile, int64_t first, int64_t last, const float* q,
                             int64_t stride, Vec (&acc)[Q][STEPS]) {
  const uint8_t* at = h.data + tile * TILE * row_bytes(s);
  KV_UNROLL for (int j = 0; j < Q; j++) {
    KV_UNROLL for (int i = 0; i < STEPS; i++) acc[j][i] = Vec(0.0f);
  }
  for (int64_t c = first; c < last; c++) {
    const Fetch fetch(s, at, c);
    const float* table = table_of(s, h.head, c);
    KV_UNROLL for (int i = 0; i < STEPS; i++) {
      const Vec x = value_of(table, fetch(i * N));
      KV_UNROLL for (int j = 0; j < Q; j++) acc[j][i] = at::vec::fmadd(x, Vec(q[j * stride + c]), acc[j][i]);
    }
  }
}

// Scores of `tiles` whole tiles with scales by token. sums: [Q][groups] of the queries.
template <int Q>
void lanes_keys(const Side& s, const Head& h, int64_t tile, int64_t tiles, const float* q, int64_t stride,
                const float* sums, float* scores) {
  const int64_t groups = s.groups;
  alignas(64) float scale[TILE], low[TILE];
  for (int64_t n = 0; n < tiles; n++) {
    for (int64_t g = 0; g < groups; g++) {
      Vec acc[Q][STEPS];
      lane_products<Q>(s, h, tile + n, g * s.group, std::min(s.width, (g + 1) * s.group), q, stride, acc);
      tile_scales(s, h, tile + n, g, scale, low);
      for (int j = 0; j < Q; j++) {
        for (int i = 0; i < STEPS; i++) {
          float* to = scores + j * BLOCK + n * TILE + i * N;
          Vec sum = at::vec::fmadd(acc[j][i], Vec::loadu(scale + i * N), Vec::loadu(low + i * N) * Vec(sums[j * groups + g]));
          if (g) sum = sum + Vec::loadu(to);
          sum.store(to);
        }
      }
    }
  }
}

// The same with scales by channel, folded into the queries beforehand; constant: [Q] what minima add.
template <int Q>
void lanes_keys_folded(const Side& s, const Head& h, int64_t tile, int64_t tiles, const float* q, int64_t stride,
                       const float* constant, float* scores) {
  for (int64_t n = 0; n < tiles; n++) {
    Vec acc[Q][STEPS];
    lane_products<Q>(s, h, tile + n, 0, s.width, q, stride, acc);
    for (int j = 0; j < Q; j++)
      for (int i = 0; i < STEPS; i++) (acc[j][i] + Vec(constant[j])).store(scores + j * BLOCK + n * TILE + i * N);
  }
}

// out[channel][q][16 lanes] += value * weights[q][token] over whole tiles; times factor[channel] where given.
template <int Q>
void lanes_values(const Side& s, const Head& h, int64_t tile, int64_t tiles, int64_t first, int64_t last,
                  const float* weights, const float* factor, float* out) {
  for (int64_t c = first; c < last; c++) {
    Vec acc[Q][STEPS];
    KV_UNROLL for (int j = 0; j < Q; j++) {
      KV_UNROLL for (int i = 0; i < STEPS; i++) acc[j][i] = Vec(0.0f);
    }
    const float* table = table_of(s, h.head, c);
    for (int64_t n = 0; n < tiles; n++) {
      const Fetch fetch(s, h.data + (tile + n) * TILE * row_bytes(s), c);
      KV_UNROLL for (int i = 0; i < STEPS; i++) {
        const Vec x = value_of(table, fetch(i * N));
        KV_UNROLL for (int j = 0; j < Q; j++)
          acc[j][i] = at::vec::fmadd(x, Vec::loadu(weights + j * BLOCK + n * TILE + i * N), acc[j][i]);
      }
    }
    const Vec times(factor ? factor[c] : 1.0f);
    for (int j = 0; j < Q; j++) {
      for (int i = 0; i < STEPS; i++) {
        float* to = out + (c * Q + j) * TILE + i * N;
        at::vec::fmadd(acc[j][i], times, Vec::loadu(to)).store(to);
      }
    }
  }
}

}  // namespace kv
