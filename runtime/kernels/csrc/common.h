// What a store looks like to the kernels, and the vectors that every file here shares. It knows no format.
#pragma once

// ATen's headers choose their vectors by these names; an extension has to say which it was compiled for.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define CPU_CAPABILITY AVX512
#define CPU_CAPABILITY_AVX512
#elif defined(__AVX2__) && defined(__FMA__)
#define CPU_CAPABILITY AVX2
#define CPU_CAPABILITY_AVX2
#else
#define CPU_CAPABILITY DEFAULT
#define CPU_CAPABILITY_DEFAULT
#endif

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(CPU_CAPABILITY_AVX512)
#include <immintrin.h>
#define KV_AVX512 1
#if defined(__AVX512VNNI__)
#define KV_DOTS 1
#endif
#endif

#define KV_UNROLL _Pragma("GCC unroll 16")
#define KV_INLINE inline __attribute__((always_inline))
#define KV_LAMBDA __attribute__((always_inline))

namespace kv {

using Vec = at::vec::Vectorized<float>;
constexpr int N = Vec::size();
constexpr int TILE = 16;    // tokens of a tile
constexpr int BLOCK = 128;  // tokens whose scores are held at once
constexpr int QUERIES = 4;  // query heads handled together
static_assert(TILE % N == 0, "a tile is whole vectors");

// How rows are encoded; the numbers are those of runtime/kernels/describe.py.
enum Form : int64_t { kRows = 0, kInt = 1, kGguf = 2, kFloat8 = 3, kTable = 4 };
enum Dtype : int64_t { kF32 = 0, kBf16 = 1, kF16 = 2, kE4m3 = 3, kE5m2 = 4 };

// A run of rows that lies in one storage; strides are bytes from one (sequence, head) to the next.
struct Part {
  int64_t start, rows, encoded;
  const uint8_t* data;
  int64_t data_stride;
  const uint8_t* scale;
  int64_t scale_stride;
  const uint8_t* low;
  int64_t low_stride;
};

struct Side {
  int64_t form, bits, width, group, unit, symmetric, scale_type, row_type, dots, rows;
  const float* table;             // kTable: [heads or 1, width or 1, 16]; kFloat8 with one scale: that scale
  int64_t table_head, table_channel;
  int64_t lows;                   // gguf: whether blocks hold a minimum
  int64_t parts_count;
  const Part* parts;
  int64_t groups;  // of channels that share a scale
};

struct Problem {
  const Side *k, *v;
  const void* q;
  void* out;
  int64_t type, batch, heads, queries, rows;  // queries: of one stored head
  float scaling, softcap;
  const float* sinks;    // [heads * queries] or null
  const int64_t* spans;  // pairs [start, stop) of rows to attend, those of each (sequence, head) one after another
  const int64_t* span_at;  // [batch * heads + 1] first span of each, or null: all rows
  int64_t chunk, threads;
  uint8_t* scratch;
};

// f(0), f(1), ... with indices known to the compiler from the start: GCC keeps an array of vectors in registers only then.
template <int... I, class F>
KV_INLINE void each_of(std::integer_sequence<int, I...>, F&& f) {
  (f(std::integral_constant<int, I>{}), ...);
}

template <int COUNT, class F>
KV_INLINE void each(F&& f) {
  each_of(std::make_integer_sequence<int, COUNT>{}, f);
}

KV_INLINE float half_bits(uint16_t bits) { return c10::detail::fp16_ieee_to_fp32_value(bits); }

KV_INLINE float load_one(const void* p, int64_t type, int64_t i) {
  if (type == kF32) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  return type == kBf16 ? c10::detail::f32_from_bits(bits) : half_bits(bits);
}

KV_INLINE int64_t bytes_of(int64_t type) { return type == kF32 ? 4 : type >= kE4m3 ? 1 : 2; }

// N values of a 16- or 32-bit type as floats.
KV_INLINE Vec load_type(const void* p, int64_t type) {
  Vec out;
  if (type == kF32) return Vec::loadu(p);
  if (type == kBf16) at::vec::load_fp32_from_bf16(static_cast<const c10::BFloat16*>(p), out);
  else at::vec::load_fp32_from_fp16(static_cast<const c10::Half*>(p), out);
  return out;
}

KV_INLINE float sum_of(const Vec& x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return a + b; }, x);
}

// The larger of each pair; neither is NaN, so that ATen's care for those would be work for nothing.
KV_INLINE Vec larger(const Vec& a, const Vec& b) {
#if KV_AVX512
  return _mm512_max_ps(a, b);
#else
  return at::vec::maximum(a, b);
#endif
}

KV_INLINE float max_of(const Vec& x) {
  return at::vec::vec_reduce_all<float>([](Vec a, Vec b) { return larger(a, b); }, x);
}

}  // namespace kv
