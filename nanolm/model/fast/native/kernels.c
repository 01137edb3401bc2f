/* What lies between the matrix products of a training step on a CPU, in float32.

   Each function splits its rows among `threads` threads. Backward functions add up the gradients of
   weights per thread, in `sums` (threads, 2, width): always in the same order, so results are
   bit-identical for the same number of threads. A null pointer means: without this weight. */

#include "kernels.h"

/* total = x + y (or x, without y) and its RMSNorm or LayerNorm, out. `stats` (rows, 2) keeps the
   mean and 1 / standard deviation of each row. */
void add_norm(const float *x, const float *y, const float *weight, const float *bias, float epsilon,
              i64 layer, i64 rows, i64 dim, float *total, float *out, float *stats, int threads) {
    FOR_EACH_PART FOR_ROWS_OF_PART {
        const float *t = x + row * dim;
        float *o = out + row * dim;
        if (y) {
            float *sum = total + row * dim;
            for (i64 i = 0; i < dim; i++) sum[i] = t[i] + y[row * dim + i];
            t = sum;
        }
        float mean = 0, squares = 0;
        if (layer) {
            SUMS(mean) for (i64 i = 0; i < dim; i++) mean += t[i];
            mean /= dim;
        }
        SUMS(squares) for (i64 i = 0; i < dim; i++) squares += (t[i] - mean) * (t[i] - mean);
        float scale = 1.0f / sqrtf(squares / dim + epsilon);
        for (i64 i = 0; i < dim; i++) o[i] = (t[i] - mean) * scale * weight[i];
        if (bias) for (i64 i = 0; i < dim; i++) o[i] += bias[i];
        stats[2 * row] = mean;
        stats[2 * row + 1] = scale;
    }
}

/* dx, from the gradients of out (`grad`) and of total (`later`, may be null). */
void add_norm_backward(const float *total, const float *weight, const float *stats,
                       const float *grad, const float *later, i64 layer, i64 rows, i64 dim,
                       float *dx, float *sums, int threads) {
    FOR_EACH_PART {
        float *dweight = sums + part * 2 * dim, *dbias = dweight + dim;
        memset(dweight, 0, 2 * dim * sizeof(float));
        FOR_ROWS_OF_PART {
            const float *t = total + row * dim, *g = grad + row * dim;
            float mean = stats[2 * row], scale = stats[2 * row + 1], along = 0, sum = 0;
            float *d = dx + row * dim;
            SUMS(along) for (i64 i = 0; i < dim; i++) {
                float unit = (t[i] - mean) * scale;
                dweight[i] += g[i] * unit;
                along += g[i] * weight[i] * unit;
            }
            if (layer) {
                SUMS(sum) for (i64 i = 0; i < dim; i++) {
                    dbias[i] += g[i];
                    sum += g[i] * weight[i];
                }
            }
            along /= dim, sum /= dim;
            for (i64 i = 0; i < dim; i++)
                d[i] = (g[i] * weight[i] - sum - (t[i] - mean) * scale * along) * scale;
            if (later) for (i64 i = 0; i < dim; i++) d[i] += later[row * dim + i];
        }
    }
}

/* 1 / RMS of one head. */
ALWAYS_INLINE float inverse_size(const float *x, float epsilon, i64 width) {
    return 1.0f / sqrtf(dot_product(x, x, width) / width + epsilon);
}

/* One head: RMSNorm if there are weights, then RoPE. */
ALWAYS_INLINE void rotate_head(const float *x, const float *weight, const float *cosines,
                               const float *sines, float epsilon, i64 width, float *restrict out) {
    if (weight) {
        float scale = inverse_size(x, epsilon, width);
        for (i64 i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
    } else {
        memcpy(out, x, width * sizeof(float));
    }
    rotate(out, cosines, sines, 1, width / 2);
}

ALWAYS_INLINE void rotate_head_backward(const float *x, const float *weight,
                                        const float *cosines, const float *sines,
                                        float epsilon, i64 width,
                                        const float *grad, float *restrict dx,
                                        float *restrict dweight) {
    memcpy(dx, grad, width * sizeof(float));
    rotate(dx, cosines, sines, -1, width / 2);
    if (!weight) return;
    float scale = inverse_size(x, epsilon, width);
    for (i64 i = 0; i < width; i++) {
        dweight[i] += dx[i] * x[i] * scale;
        dx[i] *= weight[i];
    }
    float along = scale * dot_product(dx, x, width) / width;
    for (i64 i = 0; i < width; i++) dx[i] = (dx[i] - x[i] * scale * along) * scale;
}

/* Calls a function with the width as a constant if it is a usual one, so that the compiler unrolls
   its loops over a head. */
#define WITH_WIDTH(function, width, ...)                       \
    switch (width) {                                           \
        case 16: function(16, __VA_ARGS__); break;             \
        case 32: function(32, __VA_ARGS__); break;             \
        case 64: function(64, __VA_ARGS__); break;             \
        default: function(width, __VA_ARGS__);                 \
    }

ALWAYS_INLINE void rotate_row(
    const i64 width, const float *x, const float *query_weight, const float *key_weight,
    const float *cosines, const float *sines, float epsilon, i64 heads, i64 kv_heads, float *q,
    float *k) {
    for (i64 head = 0; head < heads; head++)
        rotate_head(x + head * width, query_weight, cosines, sines, epsilon, width,
                    q + head * width);
    for (i64 head = 0; head < kv_heads; head++)
        rotate_head(x + (heads + head) * width, key_weight, cosines, sines, epsilon, width,
                    k + head * width);
}

/* Queries and keys of each token, normed and rotated, from qkv (rows, (heads + 2 kv_heads) *
   width). Row r is at position r % time. */
void qk_norm_rope(const float *qkv, const float *query_weight, const float *key_weight,
                  const float *cosines, const float *sines, float epsilon, i64 rows, i64 time,
                  i64 heads, i64 kv_heads, i64 width, float *q, float *k, int threads) {
    FOR_EACH_PART FOR_ROWS_OF_PART {
        i64 place = row % time * width;
        WITH_WIDTH(rotate_row, width, qkv + row * (heads + 2 * kv_heads) * width, query_weight,
                   key_weight, cosines + place, sines + place, epsilon, heads, kv_heads,
                   q + row * heads * width, k + row * kv_heads * width)
    }
}

ALWAYS_INLINE void rotate_row_backward(
    const i64 width, const float *x, const float *query_weight, const float *key_weight,
    const float *cosines, const float *sines, float epsilon, i64 heads, i64 kv_heads,
    const float *dq, const float *dk, float *dx, float *dquery, float *dkey) {
    for (i64 head = 0; head < heads; head++)
        rotate_head_backward(x + head * width, query_weight, cosines, sines, epsilon, width,
                             dq + head * width, dx + head * width, dquery);
    for (i64 head = 0; head < kv_heads; head++)
        rotate_head_backward(x + (heads + head) * width, key_weight, cosines, sines, epsilon,
                             width, dk + head * width, dx + (heads + head) * width, dkey);
}

void qk_norm_rope_backward(const float *qkv, const float *query_weight, const float *key_weight,
                           const float *cosines, const float *sines, float epsilon, i64 rows,
                           i64 time, i64 heads, i64 kv_heads, i64 width, const float *dq,
                           const float *dk, const float *dv, float *dqkv, float *sums,
                           int threads) {
    FOR_EACH_PART {
        float *dquery = sums + part * 2 * width, *dkey = dquery + width;
        memset(dquery, 0, 2 * width * sizeof(float));
        FOR_ROWS_OF_PART {
            i64 start = row * (heads + 2 * kv_heads) * width, place = row % time * width;
            WITH_WIDTH(rotate_row_backward, width, qkv + start, query_weight, key_weight,
                       cosines + place, sines + place, epsilon, heads, kv_heads,
                       dq + row * heads * width, dk + row * kv_heads * width, dqkv + start, dquery,
                       dkey)
            memcpy(dqkv + start + (heads + kv_heads) * width, dv + row * kv_heads * width,
                   kv_heads * width * sizeof(float));
        }
    }
}

/* out = silu(gate) * up: x (rows, 2 * width) has the gate first. */
void swiglu(const float *x, i64 rows, i64 width, float *out, int threads) {
    FOR_EACH_PART FOR_ROWS_OF_PART {
        const float *gate = x + row * 2 * width, *up = gate + width;
        float *o = out + row * width;
        for (i64 i = 0; i < width; i++) o[i] = gate[i] * sigmoid(gate[i]) * up[i];
    }
}

void swiglu_backward(const float *x, const float *grad, i64 rows, i64 width, float *dx,
                     int threads) {
    FOR_EACH_PART FOR_ROWS_OF_PART {
        const float *gate = x + row * 2 * width, *up = gate + width, *g = grad + row * width;
        float *dgate = dx + row * 2 * width, *dup = dgate + width;
        for (i64 i = 0; i < width; i++) {
            float open = sigmoid(gate[i]);
            dup[i] = g[i] * gate[i] * open;
            dgate[i] = g[i] * up[i] * open * (1 + gate[i] * (1 - open));
        }
    }
}

/* GELU with tanh: x sigmoid(2 z) with z = sqrt(2 / pi) (x + 0.044715 x^3). */
#define TWICE 1.59576912f /* 2 sqrt(2 / pi) */

void gelu_tanh(const float *x, i64 rows, i64 width, float *out, int threads) {
    FOR_EACH_PART FOR_ROWS_OF_PART {
        const float *in = x + row * width;
        float *o = out + row * width;
        for (i64 i = 0; i < width; i++)
            o[i] = in[i] * sigmoid(TWICE * in[i] * (1 + 0.044715f * in[i] * in[i]));
    }
}

void gelu_tanh_backward(const float *x, const float *grad, i64 rows, i64 width, float *dx,
                        int threads) {
    FOR_EACH_PART FOR_ROWS_OF_PART {
        const float *in = x + row * width, *g = grad + row * width;
        float *d = dx + row * width;
        for (i64 i = 0; i < width; i++) {
            float square = in[i] * in[i], open = sigmoid(TWICE * in[i] * (1 + 0.044715f * square));
            float slope = TWICE * (1 + 3 * 0.044715f * square);
            d[i] = g[i] * open * (1 + in[i] * (1 - open) * slope);
        }
    }
}

/* The exact GELU is x times the probability that a standard normal variable is below x,
   approximated to within 1e-7 (Abramowitz and Stegun, 7.1.26). `density` is e^(-x^2 / 2). */
static inline float normal_cdf(float x, float *density) {
    float z = 0.70710678f * fabsf(x), t = 1 / (1 + 0.3275911f * z);
    *density = exponential(-z * z);
    float tail = 0.5f * *density * t *
                 (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f +
                                                                     t * 1.061405429f))));
    return x > 0 ? 1 - tail : tail;
}

void gelu(const float *x, i64 rows, i64 width, float *out, int threads) {
    FOR_EACH_PART FOR_ROWS_OF_PART {
        const float *in = x + row * width;
        float *o = out + row * width, density;
        for (i64 i = 0; i < width; i++) o[i] = in[i] * normal_cdf(in[i], &density);
    }
}

void gelu_backward(const float *x, const float *grad, i64 rows, i64 width, float *dx,
                   int threads) {
    FOR_EACH_PART FOR_ROWS_OF_PART {
        const float *in = x + row * width, *g = grad + row * width;
        float *d = dx + row * width, density;
        for (i64 i = 0; i < width; i++) {
            float below = normal_cdf(in[i], &density);
            d[i] = g[i] * (below + in[i] * 0.39894228f * density); /* 1 / sqrt(2 pi) */
        }
    }
}

/* The cross-entropy of each row of logits (rows, stride), of which `columns` count. Overwrites the
   logits with softmax(logits) - onehot(target), the gradient of the sum. */
void cross_entropy(float *logits, const i64 *targets, i64 rows, i64 stride, i64 columns,
                   float *losses, int threads) {
    FOR_EACH_PART FOR_ROWS_OF_PART {
        if (targets[row] < 0 || targets[row] >= columns) {
            losses[row] = NAN;
            continue;
        }
        float *x = logits + row * stride, most = x[0], sum = 0, right = x[targets[row]];
        PRAGMA(omp simd reduction(max : most))
        for (i64 i = 0; i < columns; i++) most = x[i] > most ? x[i] : most;
        SUMS(sum) for (i64 i = 0; i < columns; i++) {
            x[i] = exponential(x[i] - most);
            sum += x[i];
        }
        float share = 1 / sum;
        for (i64 i = 0; i < columns; i++) x[i] *= share;
        x[targets[row]] -= 1;
        losses[row] = logf(sum) + most - right;
    }
}
