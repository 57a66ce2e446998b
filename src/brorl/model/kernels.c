// Operations of a decoder in float32 on a CPU, each in one pass over its memory. `kernels.py` compiles and calls them.
//
// Dimensions: T tokens or rows, H query heads, K key-value heads, G = H / K queries per key-value head, D head dimension,
// S tokens of a prompt. Keys are stored dimension by dimension, [D, length], with lengths that are padded to BLOCK.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 16  // keys whose scores are computed together
#define PARALLEL_WORK 65536  // multiplications below which one thread is faster

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int64_t size;

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec x) { *(vec *)to = x; }

INLINE vec choose(ints condition, vec x, vec y) { return (vec)(((ints)x & condition) | ((ints)y & ~condition)); }

INLINE float sum_of(vec x) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += x[i];
  return sum;
}

INLINE float max_of(vec x) {
  float max = x[0];
  for (int i = 1; i < LANES; i++) max = x[i] > max ? x[i] : max;
  return max;
}

// exp(x) of at most 88 with a relative error of 2e-7; 0 below -87. Cody and Waite's reduction, then a polynomial.
INLINE vec exp_of(vec x) {
  ints is_zero = x < -87.0f;
  vec shifted = x * 1.44269504f + 12582912.0f;  // the nearest integer is in the last bits
  vec whole = shifted - 12582912.0f;
  vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  ints power = (((ints)shifted - 0x4B400000) + 127) << 23;
  return (vec)((ints)(p * (vec)power) & ~is_zero);
}

// Replaces scores by exp(score - max); returns their sum. `count` is a multiple of LANES.
INLINE float exp_and_sum(float *score, size count, float max) {
  vec sum = {0};
  for (size i = 0; i < count; i += LANES) {
    vec e = exp_of(load(score + i) - max);
    store(score + i, e);
    sum += e;
  }
  return sum_of(sum);
}

// out = x / sqrt(mean(x^2) + epsilon) * weight of each head; the tokens of x are `stride` apart.
void rms_norm(const float *x, size stride, const float *weight, float epsilon, float *out, size tokens, size heads,
              size width, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * width > PARALLEL_WORK)
  for (size row = 0; row < tokens * heads; row++) {
    const float *from = x + row / heads * stride + row % heads * width;
    float *to = out + row * width;
    vec squares = {0};
    size i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(from + i) * load(from + i);
    float square = sum_of(squares);
    for (; i < width; i++) square += from[i] * from[i];
    float scale = 1 / sqrtf(square / width + epsilon);
    for (i = 0; i < width; i++) to[i] = from[i] * scale * weight[i];
  }
}

// Rotates the pairs (d, d + D / 2) of heads by the angles of their tokens; the tokens of x are `stride` apart.
void rotate(const float *x, size stride, const float *cos, const float *sin, float *out, size tokens, size heads, size D,
            int threads) {
  size half = D / 2;
#pragma omp parallel for num_threads(threads) if (tokens * heads * D > PARALLEL_WORK)
  for (size t = 0; t < tokens; t++)
    for (size h = 0; h < heads; h++) {
      const float *from = x + t * stride + h * D, *c = cos + t * D, *s = sin + t * D;
      float *to = out + (t * heads + h) * D;
      for (size d = 0; d < half; d++) {
        to[d] = from[d] * c[d] - from[d + half] * s[d];
        to[d + half] = from[d + half] * c[d + half] + from[d] * s[d + half];
      }
    }
}

// gate = silu(gate) * up.
void gated(float *gate, const float *up, size count, int threads) {
  size whole = count - count % LANES;
#pragma omp parallel for num_threads(threads) if (count > PARALLEL_WORK)
  for (size i = 0; i < whole; i += LANES) {
    vec x = load(gate + i), bound = {0};
    bound -= 88.0f;
    store(gate + i, x / (1 + exp_of(-choose(x > bound, x, bound))) * load(up + i));
  }
  for (size i = whole; i < count; i++) gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
}

// Scores of Q queries and BLOCKS * BLOCK keys.
#define VECS (BLOCK / LANES)
INLINE void score_block(int Q, int blocks, const float *query, const float *key, size stride, size D, float *score,
                        size width) {
  vec sum[4][4 * VECS];
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < blocks * VECS; v++) sum[q][v] = (vec){0};
  for (size d = 0; d < D; d++)
    for (int v = 0; v < blocks * VECS; v++) {
      vec k = load(key + d * stride + v * LANES);
      if (v * LANES % 16 == 0) __builtin_prefetch(key + d * stride + (v + blocks * VECS) * LANES);
      for (int q = 0; q < Q; q++) sum[q][v] += query[q * D + d] * k;
    }
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < blocks * VECS; v++) store(score + q * width + v * LANES, sum[q][v]);
}

// Scores of Q queries and the keys [D, stride]; computed in whole blocks.
INLINE void scores(int Q, const float *query, const float *key, size stride, size length, size D, float *score,
                   size width) {
  size t = 0;
  if (Q <= 2)
    for (; t + 2 * BLOCK <= length; t += 2 * BLOCK) score_block(Q, 2, query, key + t, stride, D, score + t, width);
  for (; t < length; t += BLOCK) score_block(Q, 1, query, key + t, stride, D, score + t, width);
}

// Adds the weighted sums of values [length, D] of Q queries to columns of out.
INLINE void add_columns(int Q, int vecs, const float *weight, size width, const float *value, size length, size D,
                        float *out) {
  vec sum[4][4];
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < vecs; v++) sum[q][v] = load(out + q * D + v * LANES);
  for (size t = 0; t < length; t++)
    for (int v = 0; v < vecs; v++) {
      vec x = load(value + t * D + v * LANES);
      for (int q = 0; q < Q; q++) sum[q][v] += weight[q * width + t] * x;
    }
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < vecs; v++) store(out + q * D + v * LANES, sum[q][v]);
}

INLINE void add_values(int Q, const float *weight, size width, const float *value, size length, size D, float *out) {
  size d = 0;
  if (Q <= 2)
    for (; d + 4 * LANES <= D; d += 4 * LANES) add_columns(Q, 4, weight, width, value + d, length, D, out + d);
  for (; d + 2 * LANES <= D; d += 2 * LANES) add_columns(Q, 2, weight, width, value + d, length, D, out + d);
  for (; d + LANES <= D; d += LANES) add_columns(Q, 1, weight, width, value + d, length, D, out + d);
  for (; d < D; d++)
    for (int q = 0; q < Q; q++)
      for (size t = 0; t < length; t++) out[q * D + d] += weight[q * width + t] * value[t * D + d];
}

typedef struct {
  const float *key, *value;
  size stride, length;
} Segment;

INLINE size padded(size length) { return (length + BLOCK - 1) / BLOCK * BLOCK; }

// Attention of Q queries to two segments, with one softmax.
INLINE void attend_queries(int Q, const float *query, Segment prompt, Segment row, size D, float *out, float *score) {
  size split = padded(prompt.length), width = split + padded(row.length);
  scores(Q, query, prompt.key, prompt.stride, prompt.length, D, score, width);
  scores(Q, query, row.key, row.stride, row.length, D, score + split, width);
  float total[4];
  for (int q = 0; q < Q; q++) {
    float *own = score + q * width;
    for (size t = prompt.length; t < split; t++) own[t] = -INFINITY;
    for (size t = split + row.length; t < width; t++) own[t] = -INFINITY;
    vec most = load(own);
    for (size t = LANES; t < width; t += LANES) {
      vec x = load(own + t);
      most = choose(x > most, x, most);
    }
    total[q] = exp_and_sum(own, width, max_of(most));
  }
  memset(out, 0, Q * D * sizeof(float));
  add_values(Q, score, width, prompt.value, prompt.length, D, out);
  add_values(Q, score + split, width, row.value, row.length, D, out);
  for (int q = 0; q < Q; q++)
    for (size d = 0; d < D; d++) out[q * D + d] /= total[q];
}

// One new token per row. Stores its key and value, then attends to the prompt of the row and to the row.
//
// query [T, K * G, D]; new_key, new_value [T, K, D] with rows of `new_stride`; prompt_key [P, K, D, prompt_stride],
// prompt_value [P, K, prompt_tokens, D]; row_key [slots, K, D, reserved], row_value [slots, K, reserved, D].
void attend_rows(const float *query, const float *new_key, const float *new_value, size new_stride,
                 const float *prompt_key, const float *prompt_value, size prompt_stride, size prompt_tokens,
                 const int64_t *prompt_of_row, const int64_t *prompt_length, float *row_key, float *row_value,
                 size reserved, size position, float *out, size rows, size K, size G, size D,
                 int threads) {
  size longest = padded(prompt_tokens) + padded(position + 1);
#pragma omp parallel num_threads(threads) if (rows * K * G * D * longest > 8 * PARALLEL_WORK)
  {
    float *score = malloc(4 * longest * sizeof(float));
#pragma omp for
    for (size r = 0; r < rows; r++)
      for (size k = 0; k < K; k++) {
        size cell = r * K + k, prompt = prompt_of_row[r] * K + k;
        float *key = row_key + cell * D * reserved, *value = row_value + cell * D * reserved;
        for (size d = 0; d < D; d++) key[d * reserved + position] = new_key[r * new_stride + k * D + d];
        memcpy(value + position * D, new_value + r * new_stride + k * D, D * sizeof(float));
        Segment of_prompt = {prompt_key + prompt * D * prompt_stride, prompt_value + prompt * D * prompt_tokens,
                             prompt_stride, prompt_length[prompt_of_row[r]]};
        Segment of_row = {key, value, reserved, position + 1};
        const float *q = query + cell * G * D;
        float *o = out + cell * G * D;
        size g = 0;
        for (; g + 4 <= G; g += 4) attend_queries(4, q + g * D, of_prompt, of_row, D, o + g * D, score);
        for (; g + 2 <= G; g += 2) attend_queries(2, q + g * D, of_prompt, of_row, D, o + g * D, score);
        for (; g < G; g++) attend_queries(1, q + g * D, of_prompt, of_row, D, o + g * D, score);
      }
    free(score);
  }
}
