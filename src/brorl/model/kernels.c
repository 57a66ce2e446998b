// Operations of a decoder in float32 on a CPU, each in one pass over its memory. `kernels.py` compiles and calls them.
//
// Dimensions: T tokens or rows, H query heads, K key-value heads, G = H / K queries per key-value head, D head
// dimension, S tokens of a prompt. "In blocks" means [tokens / BLOCK, D, BLOCK]: the scores of a block of keys are
// computed together.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 16
#define DRAWN 64             // tokens whose probabilities are added up before one of them is searched
#define PARALLEL_WORK 65536  // multiplications below which one thread is faster

#ifndef LANES  // numbers of a vector register
#if defined __AVX512F__
#define LANES 16
#elif defined __AVX__
#define LANES 8
#else
#define LANES 4
#endif
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int64_t size;

INLINE vec load(const float* from) { return *(const vec*)from; }
INLINE void store(float* to, vec x) { *(vec*)to = x; }

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
INLINE float exp_and_sum(float* score, size count, float max) {
  vec sum = {0};
  for (size i = 0; i < count; i += LANES) {
    vec e = exp_of(load(score + i) - max);
    store(score + i, e);
    sum += e;
  }
  return sum_of(sum);
}

// out = x / sqrt(mean(x^2) + epsilon) * weight of each head; the tokens of x are `stride` apart.
void rms_norm(const float* x, size stride, const float* weight, float epsilon, float* out, size tokens, size heads,
              size width, int threads) {
#pragma omp parallel for num_threads(threads) if (tokens * heads * width > PARALLEL_WORK)
  for (size row = 0; row < tokens * heads; row++) {
    const float* from = x + row / heads * stride + row % heads * width;
    float* to = out + row * width;
    vec squares = {0};
    size i = 0;
    for (; i + LANES <= width; i += LANES) squares += load(from + i) * load(from + i);
    float square = sum_of(squares);
    for (; i < width; i++) square += from[i] * from[i];
    float scale = 1 / sqrtf(square / width + epsilon);
    for (i = 0; i < width; i++) to[i] = from[i] * scale * weight[i];
  }
}

// Rotates the pairs (d, d + D / 2) of heads by the angles of their tokens; the strides are those of tokens.
void rotate(const float* x, size stride, const float* cos, const float* sin, float* out, size out_stride, size tokens,
            size heads, size D, int threads) {
  size half = D / 2;
#pragma omp parallel for num_threads(threads) if (tokens * heads * D > PARALLEL_WORK)
  for (size t = 0; t < tokens; t++)
    for (size h = 0; h < heads; h++) {
      const float *from = x + t * stride + h * D, *c = cos + t * D, *s = sin + t * D;
      float* to = out + t * out_stride + h * D;
      for (size d = 0; d < half; d++) {
        to[d] = from[d] * c[d] - from[d + half] * s[d];
        to[d + half] = from[d + half] * c[d + half] + from[d] * s[d + half];
      }
    }
}

// Gradients of `rms_norm`: grad_x = the gradient of x, and sums [blocks, width] that add up to that of the weight.
void rms_norm_backward(const float* x, size stride, const float* weight, float epsilon, const float* grad,
                       float* grad_x, size grad_stride, float* sums, size blocks, size tokens, size heads, size width,
                       int threads) {
  size rows = tokens * heads;
#pragma omp parallel for num_threads(threads) if (rows * width > PARALLEL_WORK)
  for (size block = 0; block < blocks; block++) {
    float* sum = sums + block * width;
    for (size row = rows * block / blocks; row < rows * (block + 1) / blocks; row++) {
      const float *from = x + row / heads * stride + row % heads * width, *g = grad + row * width;
      float* to = grad_x + row / heads * grad_stride + row % heads * width;
      vec squares = {0}, products = {0};
      size i = 0;
      for (; i + LANES <= width; i += LANES) {
        vec v = load(from + i);
        squares += v * v;
        products += load(g + i) * load(weight + i) * v;
      }
      float square = sum_of(squares), product = sum_of(products);
      for (; i < width; i++) square += from[i] * from[i], product += g[i] * weight[i] * from[i];
      float scale = 1 / sqrtf(square / width + epsilon), inner = product * scale * scale / width;
      for (i = 0; i < width; i++) {
        sum[i] += g[i] * from[i] * scale;
        to[i] = (g[i] * weight[i] - from[i] * inner) * scale;
      }
    }
  }
}

INLINE vec sigmoid_of(vec x) {
  vec bound = {0};
  bound -= 87.0f;
  return 1 / (1 + exp_of(-choose(x > bound, x, bound)));
}

INLINE float sigmoid(float x) { return 1 / (1 + expf(-x)); }

// out = silu(gate) * up.
void gated(const float* gate, const float* up, float* out, size count, int threads) {
  size whole = count - count % LANES;
#pragma omp parallel for num_threads(threads) if (count > PARALLEL_WORK)
  for (size i = 0; i < whole; i += LANES) {
    vec x = load(gate + i);
    store(out + i, x * sigmoid_of(x) * load(up + i));
  }
  for (size i = whole; i < count; i++) out[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

// Gradients of `gated`: overwrites grad with that of gate. out = silu(gate) * up.
void gated_backward(const float* gate, const float* up, float* grad, float* out, float* grad_up, size count,
                    int threads) {
  size whole = count - count % LANES;
#pragma omp parallel for num_threads(threads) if (count > PARALLEL_WORK)
  for (size i = 0; i < whole; i += LANES) {
    vec x = load(gate + i), u = load(up + i), g = load(grad + i), s = sigmoid_of(x), a = x * s;
    store(out + i, a * u);
    store(grad_up + i, g * a);
    store(grad + i, g * u * (s + a * (1 - s)));
  }
  for (size i = whole; i < count; i++) {
    float s = sigmoid(gate[i]), a = gate[i] * s, u = up[i], g = grad[i];
    out[i] = a * u, grad_up[i] = g * a, grad[i] = g * u * (s + a * (1 - s));
  }
}

// Draws a token for each of `draws` rollouts by the inverse of the cumulative softmax of its row, and its log-prob.
//
// logits [rows, vocabulary]; row [draws], ascending; uniform [draws], in [0, 1).
void draw_tokens(const float* logits, size vocabulary, float inverse_temperature, const size* row,
                 const double* uniform, size* token, double* logprob, size draws, int threads) {
  size whole = vocabulary - vocabulary % LANES, blocks = (vocabulary + DRAWN - 1) / DRAWN;
#pragma omp parallel num_threads(threads) if (draws * vocabulary > PARALLEL_WORK)
  {
    float* mass = malloc((vocabulary + LANES) * sizeof(float));
    double* edge = malloc(blocks * sizeof(double));
#pragma omp for schedule(dynamic, 16)
    for (size first = 0; first < draws; first++) {
      if (first && row[first] == row[first - 1]) continue;  // drawn with the first rollout of the row
      const float* logit = logits + row[first] * vocabulary;
      float max = logit[0];
      if (whole) {
        vec most = load(logit);
        for (size i = LANES; i < whole; i += LANES) most = choose(load(logit + i) > most, load(logit + i), most);
        max = max_of(most);
      }
      for (size i = whole; i < vocabulary; i++) max = logit[i] > max ? logit[i] : max;
      for (size i = 0; i < whole; i += LANES) store(mass + i, exp_of((load(logit + i) - max) * inverse_temperature));
      for (size i = whole; i < vocabulary; i++) {
        vec x = {0};
        mass[i] = exp_of(x + (logit[i] - max) * inverse_temperature)[0];
      }
      double total = 0;
      for (size b = 0; b < blocks; b++) {
        size stop = (b + 1) * DRAWN < vocabulary ? (b + 1) * DRAWN : vocabulary;
        for (size i = b * DRAWN; i < stop; i++) total += mass[i];
        edge[b] = total;
      }
      double log_total = log(total);
      for (size n = first; n < draws && row[n] == row[first]; n++) {
        double target = uniform[n] * total;
        size low = 0, high = blocks - 1;  // the first block whose edge is above the target
        while (low < high) {
          size middle = (low + high) / 2;
          if (edge[middle] > target)
            high = middle;
          else
            low = middle + 1;
        }
        double sum = low ? edge[low - 1] : 0;
        size chosen = low * DRAWN, i = chosen;
        do {
          if (mass[i] > 0) chosen = i;
          sum += mass[i++];
        } while (sum <= target && i < vocabulary && i < (low + 1) * DRAWN);
        token[n] = chosen;
        logprob[n] = (logit[chosen] - max) * (double)inverse_temperature - log_total;
      }
    }
    free(mass);
    free(edge);
  }
}

// Scores of Q queries and the keys of one block or two.
#define VECS (BLOCK / LANES)
INLINE void score_blocks(int Q, int blocks, const float* query, const float* first, const float* second, size D,
                         float* score, size width) {
  vec sum[4][2 * VECS];
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < blocks * VECS; v++) sum[q][v] = (vec){0};
  for (size d = 0; d < D; d++)
    for (int v = 0; v < blocks * VECS; v++) {
      const float* from = (v < VECS ? first : second) + d * BLOCK + v % VECS * LANES;
      vec k = load(from);
      if (v % VECS == 0) __builtin_prefetch(from + blocks * D * BLOCK);  // the blocks that are read next
      for (int q = 0; q < Q; q++) sum[q][v] += query[q * D + d] * k;
    }
  for (int q = 0; q < Q; q++)
    for (int v = 0; v < blocks * VECS; v++) store(score + q * width + v * LANES, sum[q][v]);
}

// Scores of Q queries and consecutive blocks of keys.
INLINE void scores(int Q, const float* query, const float* key, size length, size D, float* score, size width) {
  size t = 0;
  if (Q <= 2)
    for (; t + BLOCK < length; t += 2 * BLOCK)
      score_blocks(Q, 2, query, key + t * D, key + (t + BLOCK) * D, D, score + t, width);
  for (; t < length; t += BLOCK) score_blocks(Q, 1, query, key + t * D, NULL, D, score + t, width);
}

// The place of dimension 0 of a token among keys in blocks; the next dimensions follow at a distance of BLOCK.
INLINE size in_blocks(size token, size D) { return token / BLOCK * BLOCK * D + token % BLOCK; }

INLINE void store_in_blocks(const float* x, size D, float* blocks, size token) {
  float* to = blocks + in_blocks(token, D);
  for (size d = 0; d < D; d++) to[d * BLOCK] = x[d];
}

// Adds the weighted sums of values [length, D] of Q queries to columns of out.
INLINE void add_columns(int Q, int vecs, const float* weight, size width, const float* value, size length, size D,
                        float* out) {
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

INLINE void add_values(int Q, const float* weight, size width, const float* value, size length, size D, float* out) {
  size d = 0;
  if (Q <= 2)
    for (; d + 4 * LANES <= D; d += 4 * LANES) add_columns(Q, 4, weight, width, value + d, length, D, out + d);
  for (; d + 2 * LANES <= D; d += 2 * LANES) add_columns(Q, 2, weight, width, value + d, length, D, out + d);
  for (; d + LANES <= D; d += LANES) add_columns(Q, 1, weight, width, value + d, length, D, out + d);
  for (; d < D; d++)
    for (int q = 0; q < Q; q++)
      for (size t = 0; t < length; t++) out[q * D + d] += weight[q * width + t] * value[t * D + d];
}

// out[t] += the sum over Q vectors of weight[t] * vector; out is [length, D].
INLINE void add_outer(int Q, const float* weight, size width, const float* vector, size length, size D, float* out) {
  size d = 0;
  for (; d + 2 * LANES <= D; d += 2 * LANES) {
    vec x[4][2];
    for (int q = 0; q < Q; q++)
      for (int v = 0; v < 2; v++) x[q][v] = load(vector + q * D + d + v * LANES);
    for (size t = 0; t < length; t++)
      for (int v = 0; v < 2; v++) {
        vec sum = load(out + t * D + d + v * LANES);
        for (int q = 0; q < Q; q++) sum += weight[q * width + t] * x[q][v];
        store(out + t * D + d + v * LANES, sum);
      }
  }
  for (; d < D; d++)
    for (size t = 0; t < length; t++)
      for (int q = 0; q < Q; q++) out[t * D + d] += weight[q * width + t] * vector[q * D + d];
}

INLINE size padded(size length) { return (length + BLOCK - 1) / BLOCK * BLOCK; }

// Consecutive blocks of keys, and values [length, D].
typedef struct {
  const float *key, *value;
  size length;
} Segment;

// Blocks of keys, and of values [BLOCK, D]. Those of block b are in slot[b * stride] of its memory, for one head.
typedef struct {
  float *const *key, *const *value;
  const size* slot;
  size stride, heads, head, length;
} Pages;

INLINE size place_of(Pages row, size block, size D) {
  return (row.slot[block * row.stride] * row.heads + row.head) * D * BLOCK;
}

INLINE size least(size a, size b) { return a < b ? a : b; }

// Attention of Q queries to a prompt and to the first `row_length` tokens of a row, with one softmax.
INLINE void attend_queries(int Q, const float* query, Segment prompt, Pages row, const size* row_length, size D,
                           float* out, float* lse, float* score) {
  size split = padded(prompt.length), width = split + padded(row.length), blocks = padded(row.length) / BLOCK, b = 0;
  scores(Q, query, prompt.key, prompt.length, D, score, width);
  if (Q <= 2)
    for (; b + 2 <= blocks; b += 2)
      score_blocks(Q, 2, query, row.key[b] + place_of(row, b, D), row.key[b + 1] + place_of(row, b + 1, D), D,
                   score + split + b * BLOCK, width);
  for (; b < blocks; b++)
    score_blocks(Q, 1, query, row.key[b] + place_of(row, b, D), NULL, D, score + split + b * BLOCK, width);
  float total[4];
  for (int q = 0; q < Q; q++) {
    float* own = score + q * width;
    for (size t = prompt.length; t < split; t++) own[t] = -INFINITY;
    for (size t = split + row_length[q]; t < width; t++) own[t] = -INFINITY;
    vec most = load(own);
    for (size t = LANES; t < width; t += LANES) {
      vec x = load(own + t);
      most = choose(x > most, x, most);
    }
    float max = max_of(most);
    total[q] = exp_and_sum(own, width, max);
    lse[q] = max + logf(total[q]);
  }
  memset(out, 0, Q * D * sizeof(float));
  add_values(Q, score, width, prompt.value, prompt.length, D, out);
  for (b = 0; b < blocks; b++)
    add_values(Q, score + split + b * BLOCK, width, row.value[b] + place_of(row, b, D),
               least(BLOCK, row.length - b * BLOCK), D, out);
  for (int q = 0; q < Q; q++)
    for (size d = 0; d < D; d++) out[q * D + d] /= total[q];
}

// The same for any number of queries.
static void attend(size queries, const float* query, Segment prompt, Pages row, const size* row_length, size D,
                   float* out, float* lse, float* score) {
  size q = 0;
#define ATTEND(Q) attend_queries(Q, query + q * D, prompt, row, row_length + q, D, out + q * D, lse + q, score)
  for (; q + 4 <= queries; q += 4) ATTEND(4);
  for (; q + 2 <= queries; q += 2) ATTEND(2);
  for (; q < queries; q++) ATTEND(1);
#undef ATTEND
}

// One new token per row. Stores its key and value, then attends to the prompt of the row and to the row.
//
// query [T, K * G, D]; new_key, new_value [T, K, D] with tokens `new_stride` apart; prompt_key [P, K, padded S, D] in
// blocks, prompt_value [P, K, S, D]; row_key and row_value list the memory of blocks, [slots, K, D, BLOCK] and
// [slots, K, BLOCK, D]; slot [blocks, T].
void attend_rows(const float* query, const float* new_key, const float* new_value, size new_stride,
                 const float* prompt_key, const float* prompt_value, size prompt_tokens, const size* prompt_of_row,
                 const size* prompt_length, float* const* row_key, float* const* row_value, const size* slot,
                 size position, float* out, size rows, size K, size G, size D, int threads) {
  size longest = padded(prompt_tokens) + padded(position + 1);
#pragma omp parallel num_threads(threads) if (rows * K * G * D * longest > 8 * PARALLEL_WORK)
  {
    float *score = malloc((4 * longest + G) * sizeof(float)), *lse = score + 4 * longest;
    size* row_length = malloc(G * sizeof(size));
    for (size g = 0; g < G; g++) row_length[g] = position + 1;
#pragma omp for
    for (size cell = 0; cell < rows * K; cell++) {
      size r = cell / K, k = cell % K, prompt = prompt_of_row[r] * K + k;
      Pages row = {row_key, row_value, slot + r, rows, K, k, position + 1};
      size from = r * new_stride + k * D, last = position / BLOCK, place = place_of(row, last, D);
      store_in_blocks(new_key + from, D, row_key[last] + place, position % BLOCK);
      memcpy(row_value[last] + place + position % BLOCK * D, new_value + from, D * sizeof(float));
      Segment of_prompt = {prompt_key + prompt * D * padded(prompt_tokens), prompt_value + prompt * D * prompt_tokens,
                           prompt_length[prompt_of_row[r]]};
      attend(G, query + cell * G * D, of_prompt, row, row_length, D, out + cell * G * D, lse, score);
    }
    free(score);
    free(row_length);
  }
}

// The nodes of a tree in preorder. In this order the ancestors of a node are a stack: a node at depth t is entry t of
// it, and the entries below are its ancestors.

// Returns how many of the nodes from `node` on, at most `most`, are each the child of the one before.
INLINE size chain_length(const size* depth, size node, size end, size most) {
  size length = 1;
  while (length < most && node + length < end && depth[node + length] == depth[node] + length) length++;
  return length;
}

// Attention of the nodes of P prompts to their prompts and ancestors.
//
// query [F, K * G, D]; key, value [F, K, D]; prompt_key [P, K, padded S, D] in blocks, prompt_value [P, K, S, D];
// node_start [P + 1]; depth [F], below `deepest`; out [F, K * G, D]; lse [K, F, G].
void attend_nodes(const float* query, const float* key, const float* value, const float* prompt_key,
                  const float* prompt_value, size prompt_tokens, const size* prompt_length, const size* node_start,
                  const size* depth, size deepest, float* out, float* lse, size F, size P, size K, size G, size D,
                  int threads) {
  size reserved = padded(deepest), width = padded(prompt_tokens) + reserved, most = G < 4 ? 4 / G : 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (size task = 0; task < P * K; task++) {
    size p = task / K, k = task % K, end = node_start[p + 1];
    float* scratch = malloc((2 * reserved * D + 4 * width + 2 * most * G * D) * sizeof(float));
    float *keys = scratch, *values = keys + reserved * D, *score = values + reserved * D;
    float *queries = score + 4 * width, *outs = queries + most * G * D;
    size* row_length = malloc(most * G * sizeof(size));
    float** pages = malloc(2 * reserved / BLOCK * sizeof(float*));
    for (size b = 0; b < reserved / BLOCK; b++) {
      pages[b] = keys + b * BLOCK * D;
      pages[reserved / BLOCK + b] = values + b * BLOCK * D;
    }
    memset(keys, 0, reserved * D * sizeof(float));
    Segment prompt = {prompt_key + task * D * padded(prompt_tokens), prompt_value + task * D * prompt_tokens,
                      prompt_length[p]};
    for (size node = node_start[p], length; node < end; node += length) {
      length = chain_length(depth, node, end, most);
      for (size i = 0; i < length; i++) {
        size t = depth[node] + i, from = ((node + i) * K + k) * D;
        store_in_blocks(key + from, D, keys, t);
        memcpy(values + t * D, value + from, D * sizeof(float));
        memcpy(queries + i * G * D, query + from * G, G * D * sizeof(float));
        for (size g = 0; g < G; g++) row_length[i * G + g] = t + 1;
      }
      size slot = 0;
      Pages path = {pages, pages + reserved / BLOCK, &slot, 0, 1, 0, depth[node] + length};
      attend(length * G, queries, prompt, path, row_length, D, outs, lse + (k * F + node) * G, score);
      for (size i = 0; i < length; i++)
        memcpy(out + ((node + i) * K + k) * G * D, outs + i * G * D, G * D * sizeof(float));
    }
    free(scratch);
    free(row_length);
    free(pages);
  }
}

// Keys and values in both orders, and the sums of their gradients, [length, D].
typedef struct {
  const float *key_blocks, *value_blocks, *key, *value;
  float *grad_key, *grad_value;
  size length;
} Trained;

// Adds the gradients of Q queries that pass through a segment.
INLINE void add_gradients_of(int Q, const float* query, const float* grad, Trained segment, const size* length,
                             const float* lse, const float* inner, size D, float* grad_query, float* weight,
                             float* grad_score) {
  size width = padded(segment.length);
  scores(Q, query, segment.key_blocks, segment.length, D, weight, width);
  scores(Q, grad, segment.value_blocks, segment.length, D, grad_score, width);
  for (int q = 0; q < Q; q++) {
    float *w = weight + q * width, *g = grad_score + q * width;
    for (size t = length[q]; t < width; t++) w[t] = -INFINITY, g[t] = 0;
    for (size t = 0; t < width; t += LANES) {
      vec e = exp_of(load(w + t) - lse[q]);
      store(w + t, e);
      store(g + t, e * (load(g + t) - inner[q]));
    }
  }
  add_values(Q, grad_score, width, segment.key, segment.length, D, grad_query);
  add_outer(Q, grad_score, width, query, segment.length, D, segment.grad_key);
  add_outer(Q, weight, width, grad, segment.length, D, segment.grad_value);
}

// The same for any number of queries.
static void add_gradients(size queries, const float* query, const float* grad, Trained segment, const size* length,
                          const float* lse, const float* inner, size D, float* grad_query, float* weight,
                          float* grad_score) {
  size q = 0;
#define ADD(Q)                                                                                                     \
  add_gradients_of(Q, query + q * D, grad + q * D, segment, length + q, lse + q, inner + q, D, grad_query + q * D, \
                   weight, grad_score)
  for (; q + 4 <= queries; q += 4) ADD(4);
  for (; q + 2 <= queries; q += 2) ADD(2);
  for (; q < queries; q++) ADD(1);
#undef ADD
}

// Gradients of `attend_nodes`. All keys and values are [tokens, D] here, those of prompts also in blocks. `grad` is the
// gradient of `out`. The gradients of the prompts, [P, K, S, D], are added to.
void attend_nodes_backward(const float* query, const float* key, const float* value, const float* prompt_key,
                           const float* prompt_value, const float* prompt_key_blocks, const float* prompt_value_blocks,
                           size prompt_tokens, const size* prompt_length, const size* node_start, const size* depth,
                           size deepest, const float* out, const float* lse, const float* grad, float* grad_query,
                           float* grad_key, float* grad_value, float* grad_prompt_key, float* grad_prompt_value, size F,
                           size P, size K, size G, size D, int threads) {
  size reserved = padded(deepest), prompt_reserved = padded(prompt_tokens);
  size width = reserved > prompt_reserved ? reserved : prompt_reserved;
  size most = G < 4 ? 4 / G : 1, entry = D * sizeof(float);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (size task = 0; task < P * K; task++) {
    size p = task / K, k = task % K, end = node_start[p + 1], cells = most * G, of_prompt = task * D * prompt_tokens;
    float* scratch = calloc(6 * reserved * D + 8 * width + cells * (3 * D + 1), sizeof(float));
    float *key_blocks = scratch, *value_blocks = key_blocks + reserved * D, *keys = value_blocks + reserved * D;
    float *values = keys + reserved * D, *key_sums = values + reserved * D, *value_sums = key_sums + reserved * D;
    float *weight = value_sums + reserved * D, *grad_score = weight + 4 * width, *queries = grad_score + 4 * width;
    float *grads = queries + cells * D, *grad_queries = grads + cells * D, *inner = grad_queries + cells * D;
    size *lengths = malloc(2 * cells * sizeof(size)), *whole = lengths + cells;
    size *on_path = malloc((reserved + 1) * sizeof(size)), top = 0;
    for (size q = 0; q < cells; q++) whole[q] = prompt_length[p];
    Trained prompt = {prompt_key_blocks + task * D * prompt_reserved,
                      prompt_value_blocks + task * D * prompt_reserved,
                      prompt_key + of_prompt,
                      prompt_value + of_prompt,
                      grad_prompt_key + of_prompt,
                      grad_prompt_value + of_prompt,
                      prompt_length[p]};
    for (size node = node_start[p], length = 0; node <= end; node += length) {
      size first = node < end ? depth[node] : 0;
      for (size t = first; t < top; t++) {  // these have no more descendants
        size to = (on_path[t] * K + k) * D;
        memcpy(grad_key + to, key_sums + t * D, entry);
        memcpy(grad_value + to, value_sums + t * D, entry);
        memset(key_sums + t * D, 0, entry);
        memset(value_sums + t * D, 0, entry);
      }
      if (node == end) break;
      length = chain_length(depth, node, end, most);
      top = first + length;
      for (size i = 0; i < length; i++) {
        size t = first + i, from = ((node + i) * K + k) * D;
        on_path[t] = node + i;
        store_in_blocks(key + from, D, key_blocks, t);
        store_in_blocks(value + from, D, value_blocks, t);
        memcpy(keys + t * D, key + from, entry);
        memcpy(values + t * D, value + from, entry);
        memcpy(queries + i * G * D, query + from * G, G * entry);
        memcpy(grads + i * G * D, grad + from * G, G * entry);
        for (size g = 0; g < G; g++) {
          lengths[i * G + g] = t + 1;
          inner[i * G + g] = 0;
          for (size d = 0; d < D; d++) inner[i * G + g] += grad[(from * G + g * D) + d] * out[(from * G + g * D) + d];
        }
      }
      memset(grad_queries, 0, length * G * entry);
      Trained path = {key_blocks, value_blocks, keys, values, key_sums, value_sums, top};
      const float* of_lse = lse + (k * F + node) * G;
      add_gradients(length * G, queries, grads, prompt, whole, of_lse, inner, D, grad_queries, weight, grad_score);
      add_gradients(length * G, queries, grads, path, lengths, of_lse, inner, D, grad_queries, weight, grad_score);
      for (size i = 0; i < length; i++)
        memcpy(grad_query + ((node + i) * K + k) * G * D, grad_queries + i * G * D, G * entry);
    }
    free(scratch);
    free(lengths);
    free(on_path);
  }
}
