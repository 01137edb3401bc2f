/* Causal attention for training on a CPU. A few rows of scores stay in the cache until they are used;
   the backward pass computes them again. Head widths are multiples of 16. */

#include "kernels.h"

/* Registers, and the queries to work on at once, so that their sums fit into the registers. */
#if defined(__AVX512F__)
enum { LANES = 16, QUERIES = 8 };
#elif defined(__AVX__)
enum { LANES = 8, QUERIES = 4 };
#else
enum { LANES = 4, QUERIES = 8 };
#endif
typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

typedef int32_t integers __attribute__((vector_size(LANES * sizeof(float))));

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }
static inline i64 padded(i64 count) { return (count + LANES - 1) / LANES * LANES; }
static inline lanes *at(const float *x) { return (lanes *)x; }

/* e^x for x <= 0, as `exponential`; exactly 0 below -87. NaN stays NaN. */
static inline lanes exponentials(lanes x) {
    integers kept = ~(x < -87.0f);
    integers n = __builtin_convertvector(x * 1.44269504f - 0.5f, integers) & kept;
    lanes whole = __builtin_convertvector(n, lanes);
    lanes r = REMAINDER(x, whole);
    return (lanes)((integers)(TAYLOR(r) * (lanes)((n + 127) << 23)) & kept);
}

static inline lanes larger(lanes x, lanes y) {
    integers more = x > y;
    return (lanes)(((integers)x & more) | ((integers)y & ~more));
}

/* Half as many at a time, as `total`. */
static inline float largest(lanes x) {
    four most, parts[LANES / 4];
    memcpy(parts, &x, sizeof x);
    most = parts[0];
    for (int i = 1; i < LANES / 4; i++)
        for (int j = 0; j < 4; j++) most[j] = fmaxf(most[j], parts[i][j]);
    return fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]));
}

static inline float sum_of(lanes x) {
    sixteen wide = {0};
    memcpy(&wide, &x, sizeof x);
    return total(wide);
}

/* The softmax of the first `seen` of `columns` scores, in place; the others become 0. Returns the
   logarithm of the sum. */
static float softmax(float *x, i64 seen, i64 columns) {
    for (i64 j = seen; j < columns; j++) x[j] = -INFINITY;
    lanes mosts = *at(x), sums = {0};
    for (i64 j = LANES; j < columns; j += LANES) mosts = larger(mosts, *at(x + j));
    float most = largest(mosts);
    for (i64 j = 0; j < columns; j += LANES) sums += *at(x + j) = exponentials(*at(x + j) - most);
    float sum = sum_of(sums);
    float share = 1 / sum;
    for (i64 j = 0; j < columns; j += LANES) *at(x + j) *= share;
    return most + logf(sum);
}

/* out (QUERIES, columns) = left (QUERIES, count) @ right (count, columns), `vectors` at a time. */
static inline __attribute__((always_inline)) void multiply_columns(const float *left, i64 left_row, const float *right,
                                    i64 right_row, i64 count, float *out, i64 out_row,
                                    const int vectors) {
    lanes sums[QUERIES][2] = {0};
    for (i64 i = 0; i < count; i++)
        for (int v = 0; v < vectors; v++) {
            lanes one = *at(right + i * right_row + v * LANES);
            for (int q = 0; q < QUERIES; q++) sums[q][v] += left[q * left_row + i] * one;
        }
    for (int q = 0; q < QUERIES; q++)
        for (int v = 0; v < vectors; v++) *at(out + q * out_row + v * LANES) = sums[q][v];
}

static void multiply(const float *left, i64 left_row, const float *right, i64 right_row, i64 count,
                     float *out, i64 out_row, i64 columns) {
    i64 column = 0;
    for (; column + 2 * LANES <= columns; column += 2 * LANES)
        multiply_columns(left, left_row, right + column, right_row, count, out + column, out_row,
                         2);
    if (column < columns)
        multiply_columns(left, left_row, right + column, right_row, count, out + column, out_row,
                         1);
}

/* out (count, width) += left (QUERIES, count) transposed @ right (QUERIES, width) */
static void add_outer(const float *left, i64 left_row, const float *right, i64 count, i64 width,
                      float *out, i64 out_row) {
    for (i64 column = 0; column < width; column += LANES) {
        lanes rows[QUERIES];
        for (int q = 0; q < QUERIES; q++) rows[q] = *at(right + q * width + column);
        for (i64 i = 0; i < count; i++) {
            lanes sum = *at(out + i * out_row + column);
            for (int q = 0; q < QUERIES; q++) sum += left[q * left_row + i] * rows[q];
            *at(out + i * out_row + column) = sum;
        }
    }
}

/* out (width, padded(rows)) = x transposed, a few rows at a time, which stay in the cache */
static void transpose(const float *x, i64 stride, i64 rows, i64 width, float *out) {
    i64 columns = padded(rows);
    for (i64 first = 0; first < columns; first += LANES) {
        i64 some = least(LANES, rows - first);
        for (i64 d = 0; d < width; d++) {
            float *to = out + d * columns + first;
            const float *from = x + first * stride + d;
            if (some == LANES)
                for (i64 i = 0; i < LANES; i++) to[i] = from[i * stride];
            else
                for (i64 i = 0; i < LANES; i++) to[i] = i < some ? from[i * stride] : 0;
        }
    }
}

/* The next QUERIES rows times `scale`; zeros after the last. */
static void copy_rows(const float *x, i64 stride, i64 rows, i64 width, float scale, float *out) {
    for (i64 q = 0; q < QUERIES; q++)
        for (i64 d = 0; d < width; d++) out[q * width + d] = q < rows ? scale * x[q * stride + d] : 0;
}

/* q and out are (batch, time, heads, width); the rows of k and v, with kv_heads, are `k_stride` and
   `v_stride` apart. `sizes` (batch, heads, time) keeps the logarithms of the softmax's sums. Each
   thread has `room` floats of `scratch`: here width * columns + QUERIES * (columns + 2 * width),
   below 2 * width * columns + QUERIES * (2 * columns + 3 * width). */
void attention(const float *q, const float *k, const float *v, i64 k_stride, i64 v_stride,
               i64 batch, i64 time, i64 heads, i64 kv_heads, i64 width, float *out, float *sizes,
               float *scratch, i64 room, int threads) {
    i64 rows = batch * kv_heads, group = heads / kv_heads, columns = padded(time);
    float scale = 1.0f / sqrtf(width);
    FOR_EACH_PART {
        float *keys = scratch + part * room;
        float *scores = keys + width * columns, *queries = scores + QUERIES * columns;
        float *results = queries + QUERIES * width;
        FOR_ROWS_OF_PART {
            i64 text = row / kv_heads * time, shared = row % kv_heads;
            const float *values = v + text * v_stride + shared * width;
            transpose(k + text * k_stride + shared * width, k_stride, time, width, keys);
            for (i64 head = shared * group; head < (shared + 1) * group; head++)
                for (i64 i = 0; i < time; i += QUERIES) {
                    i64 place = ((text + i) * heads + head) * width, some = least(QUERIES, time - i);
                    copy_rows(q + place, heads * width, some, width, scale, queries);
                    multiply(queries, width, keys, columns, width, scores, columns,
                             padded(i + some));
                    for (i64 n = 0; n < QUERIES; n++) {
                        i64 seen = least(i + n + 1, i + some);
                        float size = softmax(scores + n * columns, seen, padded(i + some));
                        if (n < some) sizes[(text / time * heads + head) * time + i + n] = size;
                    }
                    multiply(scores, columns, values, v_stride, i + some, results, width, width);
                    for (i64 n = 0; n < some; n++)
                        memcpy(out + place + n * heads * width, results + n * width,
                               width * sizeof(float));
                }
        }
    }
}

/* dq (batch, time, heads, width), dk and dv (batch, time, kv_heads, width), from the gradient of
   out (`grad`). */
void attention_backward(const float *q, const float *k, const float *v, i64 k_stride, i64 v_stride,
                        i64 batch, i64 time, i64 heads, i64 kv_heads, i64 width, const float *out,
                        const float *sizes, const float *grad, float *dq, float *dk, float *dv,
                        float *scratch, i64 room, int threads) {
    i64 rows = batch * kv_heads, group = heads / kv_heads, columns = padded(time);
    i64 kv_row = kv_heads * width;
    float scale = 1.0f / sqrtf(width);
    FOR_EACH_PART {
        float *keys = scratch + part * room;
        float *values = keys + width * columns, *shares = values + width * columns;
        float *dshares = shares + QUERIES * columns, *queries = dshares + QUERIES * columns;
        float *grads = queries + QUERIES * width, *results = grads + QUERIES * width;
        FOR_ROWS_OF_PART {
            i64 text = row / kv_heads * time, shared = row % kv_heads;
            const float *key_rows = k + text * k_stride + shared * width;
            float *dkeys = dk + text * kv_row + shared * width;
            float *dvalues = dv + text * kv_row + shared * width;
            transpose(key_rows, k_stride, time, width, keys);
            transpose(v + text * v_stride + shared * width, v_stride, time, width, values);
            for (i64 i = 0; i < time; i++) {
                memset(dkeys + i * kv_row, 0, width * sizeof(float));
                memset(dvalues + i * kv_row, 0, width * sizeof(float));
            }
            for (i64 head = shared * group; head < (shared + 1) * group; head++)
                for (i64 i = 0; i < time; i += QUERIES) {
                    i64 place = ((text + i) * heads + head) * width, some = least(QUERIES, time - i);
                    i64 limit = padded(i + some);
                    copy_rows(q + place, heads * width, some, width, scale, queries);
                    copy_rows(grad + place, heads * width, some, width, 1, grads);
                    multiply(queries, width, keys, columns, width, shares, columns, limit);
                    multiply(grads, width, values, columns, width, dshares, columns, limit);
                    for (i64 n = 0; n < QUERIES; n++) {
                        float *x = shares + n * columns, *dx = dshares + n * columns, along = 0;
                        const float *o = out + place + n * heads * width, *g = grads + n * width;
                        float size = 0;
                        i64 seen = n < some ? i + n + 1 : 0;
                        if (seen) {
                            size = sizes[(text / time * heads + head) * time + i + n];
                            along = dot_product(o, g, width);
                        }
                        for (i64 j = seen; j < limit; j++) x[j] = -INFINITY;
                        for (i64 j = 0; j < limit; j += LANES) {
                            *at(x + j) = exponentials(*at(x + j) - size);
                            *at(dx + j) = *at(x + j) * (*at(dx + j) - along);
                        }
                    }
                    multiply(dshares, columns, key_rows, k_stride, i + some, results, width, width);
                    for (i64 n = 0; n < some; n++)
                        for (i64 d = 0; d < width; d++)
                            dq[place + n * heads * width + d] = scale * results[n * width + d];
                    add_outer(dshares, columns, queries, i + some, width, dkeys, kv_row);
                    add_outer(shares, columns, grads, i + some, width, dvalues, kv_row);
                }
        }
    }
}
