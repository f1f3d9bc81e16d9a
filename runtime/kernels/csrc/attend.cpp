// Decode attention over a packed cache: split over heads and chunks of tokens, softmax block by block, merged at the end.
#include <atomic>
#include <memory>
#include <vector>

#include "sides.h"

namespace kv {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Task {
  int64_t bh, start, stop;
  float* partial;  // [queries][2 + values' width]: largest logit, sum of weights, sums of values
};

// Weights of the block's tokens [low, high) of Q queries from their logits, in place. largest: the largest logit so far,
// brought up to date; alpha: what this makes of weights before; sum: of the weights; peak: the largest of them.
template <int Q>
void soften(const Problem& p, float* scores, int64_t low, int64_t high, float* largest, float* alpha, float* sum, float* peak) {
  const int64_t end = (high + TILE - 1) / TILE * TILE;
  auto hide = [&](float* row) {
    for (int64_t t = 0; t < low; t++) row[t] = kNone;
    for (int64_t t = high; t < end; t++) row[t] = kNone;
  };
  const Vec cap(p.softcap), inverse(p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f);
  for (int j = 0; j < Q; j++) {
    float* row = scores + j * BLOCK;
    hide(row);
    if (p.softcap > 0.0f) {
      for (int64_t t = 0; t < end; t += N) ((Vec::loadu(row + t) * inverse).tanh() * cap).store(row + t);
      hide(row);
    }
  }
  alignas(64) float below[N] = {};
  each<Q>([&](auto j) KV_LAMBDA {
    Vec most = Vec::loadu(scores + j * BLOCK);
    for (int64_t t = N; t < end; t += N) most = larger(most, Vec::loadu(scores + j * BLOCK + t));
    const float here = max_of(most), before = largest[j];
    largest[j] = std::max(before, here);
    below[j] = here - largest[j];
    alpha[j] = largest[j] > before && before > kNone ? std::exp(before - largest[j]) : 1.0f;
  });
  each<Q>([&](auto j) KV_LAMBDA {
    Vec total(0.0f);
    const Vec most(largest[j]);
    for (int64_t t = 0; t < end; t += N) {
      const Vec w = (Vec::loadu(scores + j * BLOCK + t) - most).exp_u20();
      w.store(scores + j * BLOCK + t);
      total = total + w;
    }
    sum[j] = sum_of(total);
  });
  Vec::loadu(below).exp_u20().store(below);
  for (int j = 0; j < Q; j++) peak[j] = below[j];
}

template <int Q, int NP>
void run(const Problem& p, const Task& task, int64_t first) {
  static thread_local Buffer memory;
  const int64_t wide = (p.k->width + 63) / 64 * 64, deep = (p.v->width + 63) / 64 * 64;
  float* at = memory.at_least(Q * (wide + BLOCK) + Keys<Q, NP>::floats(*p.k, wide) + Values<Q, NP>::floats(*p.v, deep) + 256);
  float *q = at, *scores = at + Q * wide;
  at = scores + Q * BLOCK;
  std::memset(q, 0, Q * wide * sizeof(float));
  for (int j = 0; j < Q; j++)
    for (int64_t c = 0; c < p.k->width; c++)
      q[j * wide + c] = p.scaling * load_one(p.q, p.type, (task.bh * p.queries + first + j) * p.k->width + c);
  Keys<Q, NP> keys(*p.k, q, wide, at);
  Values<Q, NP> values(*p.v, deep, at + (Keys<Q, NP>::floats(*p.k, wide) + 15) / 16 * 16);
  values.clear();
  float largest[Q], total[Q], alpha[Q], sum[Q], peak[Q];
  for (int j = 0; j < Q; j++) largest[j] = kNone, total[j] = 0.0f;

  const int64_t whole[2] = {0, p.rows};
  const int64_t* span = p.span_at ? p.spans + 2 * p.span_at[task.bh] : whole;
  const int64_t spans = p.span_at ? p.span_at[task.bh + 1] - p.span_at[task.bh] : 1;
  for (int64_t i = 0; i < spans; i++) {
    const int64_t start = std::max(span[2 * i], task.start), stop = std::min(span[2 * i + 1], task.stop);
    for (int64_t t = start / TILE * TILE; t < stop; t += BLOCK) {
      const int64_t end = std::min(t + BLOCK, stop);
      for (int64_t n = 0; n < p.k->parts_count; n++) {
        const Part& part = p.k->parts[n];
        const int64_t from = std::max(t, part.start), to = std::min(end, part.start + part.rows);
        if (from < to) keys.score(part, head_of(*p.k, part, task.bh, p.heads), from - part.start, to - part.start, scores + from - t);
      }
      soften<Q>(p, scores, std::max<int64_t>(start - t, 0), end - t, largest, alpha, sum, peak);
      for (int j = 0; j < Q; j++) {
        if (alpha[j] != 1.0f) values.rescale(j, alpha[j]);
        total[j] = total[j] * alpha[j] + sum[j];
      }
      for (int64_t n = 0; n < p.v->parts_count; n++) {
        const Part& part = p.v->parts[n];
        const int64_t from = std::max(t, part.start), to = std::min(end, part.start + part.rows);
        if (from < to) values.add(part, head_of(*p.v, part, task.bh, p.heads), from - part.start, to - part.start, scores + from - t, peak);
      }
    }
  }
  for (int j = 0; j < Q; j++) {
    float* to = task.partial + (first + j) * (2 + p.v->width);
    to[0] = largest[j];
    to[1] = total[j];
    values.finish(j, to + 2);
  }
}

template <int NP>
void run_all(const Problem& p, const Task& task) {
  int64_t first = 0;
  for (; first + 4 <= p.queries; first += 4) run<4, NP>(p, task, first);
  switch (p.queries - first) {
    case 3: return run<3, NP>(p, task, first);
    case 2: return run<2, NP>(p, task, first);
    case 1: return run<1, NP>(p, task, first);
  }
}

void store_one(void* out, int64_t type, int64_t i, float x) {
  if (type == kF32) static_cast<float*>(out)[i] = x;
  else if (type == kBf16) static_cast<c10::BFloat16*>(out)[i] = c10::BFloat16(x);
  else static_cast<c10::Half*>(out)[i] = c10::Half(x);
}

// Output of one (sequence, head) from the partial sums of its chunks.
void merge(const Problem& p, int64_t bh, int64_t chunks, const float* partial) {
  const int64_t width = p.v->width, step = 2 + width;
  std::vector<float> sum(width);
  for (int64_t j = 0; j < p.queries; j++) {
    const float sink = p.sinks ? p.sinks[bh % p.heads * p.queries + j] : kNone;
    float largest = sink;
    for (int64_t c = 0; c < chunks; c++) largest = std::max(largest, partial[(c * p.queries + j) * step]);
    float total = p.sinks ? std::exp(sink - largest) : 0.0f;
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int64_t c = 0; c < chunks; c++) {
      const float* from = partial + (c * p.queries + j) * step;
      if (from[0] == kNone) continue;
      const float times = std::exp(from[0] - largest);
      total += times * from[1];
      for (int64_t i = 0; i < width; i++) sum[i] += times * from[2 + i];
    }
    for (int64_t i = 0; i < width; i++) store_one(p.out, p.type, (bh * p.queries + j) * width + i, sum[i] / total);
  }
}

void attend(const Problem& p) {
  const int64_t pairs = p.batch * p.heads, chunks = std::max<int64_t>(1, (p.rows + p.chunk - 1) / p.chunk);
  const int64_t each = p.queries * (2 + p.v->width);
  std::vector<float> partial(pairs * chunks * each);
  std::unique_ptr<std::atomic<int64_t>[]> left(new std::atomic<int64_t>[pairs]);
  for (int64_t i = 0; i < pairs; i++) left[i] = chunks;
  std::atomic<int64_t> next{0};
  // tasks are taken one by one, so that a thread that is held up by others on the machine does not hold up all
  at::parallel_for(0, p.threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < pairs * chunks; i = next++) {
      const int64_t bh = i / chunks, c = i % chunks;
      const Task task{bh, c * p.chunk, std::min((c + 1) * p.chunk, p.rows), partial.data() + i * each};
      if (p.type == kF32) run_all<3>(p, task);
      else run_all<2>(p, task);
      if (--left[bh] == 0) merge(p, bh, chunks, partial.data() + bh * chunks * each);
    }
  });
}

}  // namespace
}  // namespace kv

extern "C" {

// Which kernels were compiled in: 0 ATen's vectors, 1 with AVX-512, 2 with integer dot products.
int kvsim_level() { return kv::kDots ? 2 : kv::N == 16 ? 1 : 0; }

int kvsim_lanes() { return kv::N; }

// So many multiply-adds of whole vectors, nothing else: how fast arithmetic can be here.
float kvsim_multiply(int64_t count) {
  constexpr int AT_ONCE = 12;
  kv::Vec sum[AT_ONCE], x(1.0f), y(1e-30f);
  kv::each<AT_ONCE>([&](auto i) KV_LAMBDA { sum[i] = kv::Vec(static_cast<float>(i)); });
  for (int64_t n = 0; n < count; n += AT_ONCE) {
    kv::each<AT_ONCE>([&](auto i) KV_LAMBDA { sum[i] = at::vec::fmadd(sum[i], x, y); });
  }
  kv::each<AT_ONCE - 1>([&](auto i) KV_LAMBDA { sum[0] = sum[0] + sum[i + 1]; });
  return kv::sum_of(sum[0]);
}

void kvsim_attend(const kv::Problem* problem) { kv::attend(*problem); }
}
