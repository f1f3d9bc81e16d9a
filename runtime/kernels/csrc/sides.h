// One block of tokens against one side, whatever its format: which kernel does what, and the state that they need.
#pragma once
#include "dots.h"
#include "rows.h"

namespace kv {

#if KV_DOTS
constexpr bool kDots = true;
#else
constexpr bool kDots = false;
#endif

// Memory of one thread; it grows to what the largest call needs and stays.
struct Buffer {
  float* data = nullptr;
  size_t size = 0;
  float* at_least(size_t count) {
    if (count > size) {
      std::free(data);
      size = (count + 15) / 16 * 16;
      data = static_cast<float*>(std::aligned_alloc(64, size * sizeof(float)));
    }
    return data;
  }
  ~Buffer() { std::free(data); }
};

inline Head head_of(const Side& s, const Part& p, int64_t bh, int64_t heads) {
  return {p.data + bh * p.data_stride, p.scale ? p.scale + bh * p.scale_stride : nullptr,
          p.low ? p.low + bh * p.low_stride : nullptr, p.rows, bh % heads};
}

// -- keys --------------------------------------------------------------------------------------------------------------

template <int Q, int NP>
struct Keys {
  const Side& s;
  int64_t stride;
  const float* q;   // [Q][stride], scaled
  float* folded;    // [Q][stride], times the scales of a unit of channels
  float* sums;      // [Q][groups] sums of the queries
  int32_t* words;
  float unit[Q], constant[Q];
  const uint8_t* unit_held = nullptr;

  static size_t floats(const Side& s, int64_t stride) { return Q * (stride + 512 + s.groups + 64); }

  Keys(const Side& side, const float* queries, int64_t wide, float* memory) : s(side), stride(wide), q(queries) {
    folded = memory;
    words = reinterpret_cast<int32_t*>(memory + Q * stride);
    sums = memory + Q * (stride + 512);
    if (s.form == kRows || s.form == kFloat8) return;
    for (int j = 0; j < Q; j++)
      for (int64_t g = 0; g < s.groups; g++) {
        float sum = 0.0f;
        for (int64_t c = g * s.group; c < std::min(s.width, (g + 1) * s.group); c++) sum += q[j * stride + c];
        sums[j * s.groups + g] = sum;
      }
#if KV_DOTS
    if (s.dots && !s.unit) split_queries<NP, Q>(s, q, stride, words, unit);
#endif
  }

  void fold(const Head& h, int64_t index) {
    const int64_t at = index * s.width * bytes_of(s.scale_type);
    const uint8_t *scale = h.scale + at, *low = h.low ? h.low + at : nullptr;
    if (scale == unit_held) return;
    unit_held = scale;
    const float offset = offset_of(s);
    const int64_t size = bytes_of(s.scale_type), whole = s.width / N * N;
    Vec sum[Q];
    each<Q>([&](auto j) KV_LAMBDA { sum[j] = Vec(0.0f); });
    for (int64_t c = 0; c < whole; c += N) {
      const Vec y = load_type(scale + c * size, s.scale_type);
      const Vec z = low ? load_type(low + c * size, s.scale_type) : y * Vec(offset);
      each<Q>([&](auto j) KV_LAMBDA {
        const Vec x = Vec::loadu(q + j * stride + c);
        (x * y).store(folded + j * stride + c);
        sum[j] = at::vec::fmadd(x, z, sum[j]);
      });
    }
    for (int j = 0; j < Q; j++) {
      constant[j] = sum_of(sum[j]);
      for (int64_t c = whole; c < s.width; c++) {
        const float x = q[j * stride + c], y = load_one(scale, s.scale_type, c);
        folded[j * stride + c] = x * y;
        constant[j] += x * (low ? load_one(low, s.scale_type, c) : y * offset);
      }
    }
#if KV_DOTS
    if (s.dots) split_queries<NP, Q>(s, folded, stride, words, unit);
#endif
  }

  void tiles(const Head& h, int64_t tile, int64_t count, float* scores) {
    const bool by_channel = s.unit > 0;
#if KV_DOTS
    if (s.dots) return dots_keys<NP, Q>(s, h, tile, count, words, unit, sums, by_channel ? constant : nullptr, scores);
#endif
    if (by_channel) lanes_keys_folded<Q>(s, h, tile, count, folded, stride, constant, scores);
    else lanes_keys<Q>(s, h, tile, count, q, stride, sums, scores);
  }

  // Scores of rows [from, to) of a part; whole tiles are written.
  void score(const Part& p, const Head& h, int64_t from, int64_t to, float* scores) {
    if (!p.encoded || s.form == kFloat8) {
      const int64_t type = p.encoded ? s.bits : s.row_type;
      const float times = p.encoded && s.table ? s.table[0] : 1.0f;
      const uint8_t* rows = h.data + from * s.width * bytes_of(type);
      const uint8_t* scale = p.encoded && h.scale ? h.scale + from * 2 : nullptr;
      switch (type) {
        case kF32: return rows_keys<kF32, Q>(s, times, rows, scale, to - from, q, stride, scores);
        case kBf16: return rows_keys<kBf16, Q>(s, times, rows, scale, to - from, q, stride, scores);
        case kF16: return rows_keys<kF16, Q>(s, times, rows, scale, to - from, q, stride, scores);
        case kE4m3: return rows_keys<kE4m3, Q>(s, times, rows, scale, to - from, q, stride, scores);
        default: return rows_keys<kE5m2, Q>(s, times, rows, scale, to - from, q, stride, scores);
      }
    }
    while (from < to) {
      int64_t stop = to;
      if (s.unit) {
        fold(h, from / s.unit);
        stop = std::min(to, (from / s.unit + 1) * s.unit);
      }
      const int64_t count = (stop - from + TILE - 1) / TILE;
      tiles(h, from / TILE, count, scores);
      scores += stop - from;
      from = stop;
    }
  }
};

// -- values ------------------------------------------------------------------------------------------------------------

template <int Q, int NP>
struct Values {
  const Side& s;
  int64_t stride, places;  // channels padded to vectors; places of the encoded sums
  float *plain;            // [Q][stride] sums by channel: rows, minima of folded scales
  float *coded;            // [Q][places], or [channel][Q][16] by lanes
  float *lows;             // [Q][groups] sums of weights times minima
  float *scale, *low, *weight, *factor;
  int32_t *words, *channel;
  bool used = false;

  static int64_t places_of(const Side& s) {
#if KV_DOTS
    if (s.dots) return strips_of(s) * (8 / s.bits) * 16;
#endif
    return s.form == kInt || s.form == kGguf || s.form == kTable ? s.width * TILE : 0;
  }

  static size_t floats(const Side& s, int64_t stride) {
    return Q * (stride + 16 + s.groups + BLOCK * 2) + places_of(s) * (Q + 2) + 2 * BLOCK + 256;
  }

  Values(const Side& side, int64_t wide, float* memory) : s(side), stride(wide), places(places_of(side)) {
    auto take = [&](int64_t count) { float* at = memory; memory += (count + 15) / 16 * 16; return at; };
    plain = take(Q * stride);
    coded = take(Q * places);
    lows = take(Q * s.groups);
    scale = take(BLOCK);
    low = take(BLOCK);
    weight = take(Q * BLOCK);
    words = reinterpret_cast<int32_t*>(take(Q * BLOCK));
    factor = take(places);
    channel = reinterpret_cast<int32_t*>(take(places));
#if KV_DOTS
    if (s.dots) channels_of(s, channel);
#endif
  }

  void clear() {
    used = false;
    std::memset(plain, 0, Q * stride * sizeof(float));
    std::memset(coded, 0, Q * places * sizeof(float));
    std::memset(lows, 0, Q * s.groups * sizeof(float));
  }

  // Everything of query j times alpha.
  void rescale(int j, float alpha) {
    const Vec times(alpha);
    for (int64_t c = 0; c < stride; c += N) (Vec::loadu(plain + j * stride + c) * times).store(plain + j * stride + c);
    for (int64_t g = 0; g < s.groups; g++) lows[j * s.groups + g] *= alpha;
    if (!used) return;
    if (s.dots) {
      for (int64_t c = 0; c < places; c += N) (Vec::loadu(coded + j * places + c) * times).store(coded + j * places + c);
    } else {
      for (int64_t c = 0; c < s.width && places; c++)
        for (int i = 0; i < TILE; i += N) {
          float* at = coded + (c * Q + j) * TILE + i;
          (Vec::loadu(at) * times).store(at);
        }
    }
  }

  // Adds weights [Q][BLOCK] (from row `from` on) times rows [from, to) of a part; peak: [Q] of the weights.
  void add(const Part& p, const Head& h, int64_t from, int64_t to, const float* weights, const float* peak) {
    if (!p.encoded || s.form == kFloat8) {
      const int64_t type = p.encoded ? s.bits : s.row_type;
      const float times = p.encoded && s.table ? s.table[0] : 1.0f;
      const uint8_t* rows = h.data + from * s.width * bytes_of(type);
      const uint8_t* scales = p.encoded && h.scale ? h.scale + from * 2 : nullptr;
      switch (type) {
        case kF32: return rows_values<kF32, Q>(s, times, rows, scales, to - from, weights, plain, stride);
        case kBf16: return rows_values<kBf16, Q>(s, times, rows, scales, to - from, weights, plain, stride);
        case kF16: return rows_values<kF16, Q>(s, times, rows, scales, to - from, weights, plain, stride);
        case kE4m3: return rows_values<kE4m3, Q>(s, times, rows, scales, to - from, weights, plain, stride);
        default: return rows_values<kE5m2, Q>(s, times, rows, scales, to - from, weights, plain, stride);
      }
    }
    used = true;
    const int64_t tile = from / TILE, tiles = (to - from + TILE - 1) / TILE;
    if (s.unit) return add_by_channel(h, from, to, weights, peak);
    [[maybe_unused]] float* sums = coded;
    for (int64_t g = 0; g < s.groups; g++) {
      const float largest = block_scales(s, h, tile, tiles, g, scale, low);
#if KV_DOTS
      if (s.dots) {
        float unit[Q];
        split_weights<NP, Q>(weights, scale, low, largest, peak, tiles, words, unit, lows + g, s.groups);
        dots_values<NP, Q>(s, h, g, tile * 4, 0, tiles * 4, words, unit, nullptr, sums, places);
        sums += (group_bytes(s, g) + 15) / 16 * (8 / s.bits) * 16;
        continue;
      }
#endif
      for (int j = 0; j < Q; j++) {
        Vec sum(0.0f);
        for (int64_t t = 0; t < tiles * TILE; t += N) {
          const Vec w = Vec::loadu(weights + j * BLOCK + t);
          sum = at::vec::fmadd(w, Vec::loadu(low + t), sum);
          (w * Vec::loadu(scale + t)).store(weight + j * BLOCK + t);
        }
        lows[j * s.groups + g] += sum_of(sum);
      }
      lanes_values<Q>(s, h, tile, tiles, g * s.group, std::min(s.width, (g + 1) * s.group), weight, nullptr, coded);
    }
  }

  // Scales by channel: sums of one unit of rows at a time, each times its factor.
  void add_by_channel(const Head& h, int64_t from, int64_t to, const float* weights, const float* peak) {
    const int64_t size = bytes_of(s.scale_type), start = from;
#if KV_DOTS
    float unit[Q];
    if (s.dots) split_weights<NP, Q>(weights, nullptr, nullptr, 1.0f, peak, (to - from + TILE - 1) / TILE, words, unit, nullptr, 0);
#endif
    while (from < to) {
      const int64_t index = from / s.unit, stop = std::min(to, (index + 1) * s.unit);
      const uint8_t *scales = h.scale + index * s.width * size, *least = h.low ? h.low + index * s.width * size : nullptr;
      const float offset = offset_of(s);
      const int64_t tiles = (stop - from + TILE - 1) / TILE;  // weights behind the last row are 0
      for (int j = 0; j < Q; j++) {
        Vec sum(0.0f);
        for (int64_t t = from; t < stop; t += N) sum = sum + Vec::loadu(weights + j * BLOCK + t - start);
        const float total = sum_of(sum);
        for (int64_t c = 0; c < s.width; c++)
          plain[j * stride + c] += total * (least ? load_one(least, s.scale_type, c) : offset * load_one(scales, s.scale_type, c));
      }
#if KV_DOTS
      if (s.dots) {
        for (int64_t i = 0; i < places; i++) factor[i] = channel[i] < 0 ? 0.0f : load_one(scales, s.scale_type, channel[i]);
        dots_values<NP, Q>(s, h, 0, start / 4, (from - start) / 4, tiles * 4, words, unit, factor, coded, places);
        from = stop;
        continue;
      }
#endif
      for (int64_t c = 0; c < s.width; c++) factor[c] = load_one(scales, s.scale_type, c);
      lanes_values<Q>(s, h, from / TILE, tiles, 0, s.width, weights + from - start, factor, coded);
      from = stop;
    }
  }

  // The sums of query j by channel.
  void finish(int j, float* out) const {
    for (int64_t c = 0; c < s.width; c++) out[c] = plain[j * stride + c];
    if (!used) return;
    const bool shifted = !s.unit;
    for (int64_t c = 0; c < s.width && shifted; c++) out[c] += lows[j * s.groups + c / s.group];
    if (s.dots) {
      for (int64_t i = 0; i < places; i++)
        if (channel[i] >= 0) out[channel[i]] += coded[j * places + i];
    } else {
      for (int64_t c = 0; c < s.width; c++) {
        Vec sum = Vec::loadu(coded + (c * Q + j) * TILE);
        for (int i = N; i < TILE; i += N) sum = sum + Vec::loadu(coded + (c * Q + j) * TILE + i);
        out[c] += sum_of(sum);
      }
    }
  }
};

}  // namespace kv
