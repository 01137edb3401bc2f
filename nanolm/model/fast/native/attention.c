/* Causal attention for training on a CPU. One lane of each vector belongs to one query, so that a
   softmax needs no sums over lanes; the scores of these queries stay in the cache until they are
   used, and the backward pass computes them again. Head widths are multiples of 16. */

#include "kernels.h"

/* Floats in a register, and the rows of a product whose sums stay in registers. */
#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 8 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 4 };
#else
enum { LANES = 4, ROWS = 8 };
#endif
typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(LANES * sizeof(float))));

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }
static inline lanes *at(const float *x) { return (lanes *)x; }

static inline lanes choose(integers first, lanes x, lanes y) {
    return (lanes)(((integers)x & first) | ((integers)y & ~first));
}

/* e^x for x <= 0, as `exponential`; exactly 0 below -87. NaN stays NaN. */
static inline lanes exponentials(lanes x) {
    integers kept = ~(x < -87.0f);
    integers n = __builtin_convertvector(x * 1.44269504f - 0.5f, integers) & kept;
    lanes whole = __builtin_convertvector(n, lanes);
    lanes r = REMAINDER(x, whole);
    return (lanes)((integers)(TAYLOR(r) * (lanes)((n + 127) << 23)) & kept);
}

/* One operand of a product: element (i, j) is at x[i * row + j * column]. */
struct operand {
    const float *x;
    i64 row, column;
};

/* out = left @ right, for `rows` rows of `vectors` vectors, plus what is there if `add` */
ALWAYS_INLINE void multiply_rows(struct operand left,
                                                                const float *right, i64 right_row,
                                                                i64 count, float *out, i64 out_row,
                                                                const int rows, const int vectors,
                                                                int add) {
    lanes sums[ROWS][2] = {0};
    if (add)
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sums[r][v] = *at(out + r * out_row + v * LANES);
    for (i64 i = 0; i < count; i++)
        for (int v = 0; v < vectors; v++) {
            lanes one = *at(right + i * right_row + v * LANES);
            for (int r = 0; r < rows; r++)
                sums[r][v] += left.x[r * left.row + i * left.column] * one;
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) *at(out + r * out_row + v * LANES) = sums[r][v];
}

ALWAYS_INLINE void multiply_columns(struct operand left,
                                                                   const float *right,
                                                                   i64 right_row, i64 count,
                                                                   float *out, i64 out_row,
                                                                   i64 rows, const int vectors,
                                                                   int add) {
    for (; rows >= ROWS; rows -= ROWS, left.x += ROWS * left.row, out += ROWS * out_row)
        multiply_rows(left, right, right_row, count, out, out_row, ROWS, vectors, add);
    for (; rows > 0; rows--, left.x += left.row, out += out_row)
        multiply_rows(left, right, right_row, count, out, out_row, 1, vectors, add);
}

/* out (rows, columns) = left (rows, count) @ right (count, columns), or added to it */
static void multiply(struct operand left, const float *right, i64 right_row, i64 count, float *out,
                     i64 out_row, i64 rows, i64 columns, int add) {
    i64 column = 0;
    for (; column + 2 * LANES <= columns; column += 2 * LANES)
        multiply_columns(left, right + column, right_row, count, out + column, out_row, rows, 2,
                         add);
    if (column < columns)
        multiply_columns(left, right + column, right_row, count, out + column, out_row, rows, 1,
                         add);
}

/* out (width, LANES) = scale * the next rows of x, transposed; zeros after the last */
static void transpose(const float *x, i64 stride, i64 rows, i64 width, float scale, float *out) {
    for (i64 lane = 0; lane < LANES; lane++)
        for (i64 d = 0; d < width; d++)
            out[d * LANES + lane] = lane < rows ? scale * x[lane * stride + d] : 0;
}

/* The scores of LANES queries from position `first` on, (first + rows, LANES): -inf for keys
   after a query. */
static void score(const float *queries, const float *keys, i64 k_stride, i64 first, i64 rows,
                  i64 width, float *scores) {
    multiply((struct operand){keys, k_stride, 1}, queries, LANES, width, scores, LANES,
             first + rows, LANES, 0);
    integers lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int32_t i = 1; i < rows; i++) {
        float *x = scores + (first + i) * LANES;
        *at(x) = choose(lane >= i, *at(x), (lanes){0} - INFINITY);
    }
}

/* q and out are (batch, time, heads, width); the rows of k and v, with kv_heads, are `k_stride` and
   `v_stride` apart. `sizes` (batch, heads, 2, time) keeps the largest score of each query, and 1
   over the softmax's sum. Each thread has `room` floats of `scratch`,
   here LANES * (time + width). */
void attention(const float *q, const float *k, const float *v, i64 k_stride, i64 v_stride,
               i64 batch, i64 time, i64 heads, i64 kv_heads, i64 width, float *out, float *sizes,
               float *scratch, i64 room, int threads) {
    i64 rows = batch * kv_heads, group = heads / kv_heads;
    float scale = 1.0f / sqrtf(width);
    FOR_EACH_PART {
        float *scores = scratch + part * room, *queries = scores + LANES * time;
        FOR_ROWS_OF_PART {
            i64 text = row / kv_heads, shared = row % kv_heads;
            const float *keys = k + text * time * k_stride + shared * width;
            const float *values = v + text * time * v_stride + shared * width;
            for (i64 head = shared * group; head < (shared + 1) * group; head++)
                for (i64 i = 0; i < time; i += LANES) {
                    i64 place = ((text * time + i) * heads + head) * width;
                    i64 some = least(LANES, time - i), seen = i + some;
                    float *kept = sizes + (text * heads + head) * 2 * time + i;
                    transpose(q + place, heads * width, some, width, scale, queries);
                    score(queries, keys, k_stride, i, some, width, scores);
                    lanes most = *at(scores), sum = {0};
                    for (i64 j = 1; j < seen; j++) {
                        lanes other = *at(scores + j * LANES);
                        most = choose(other > most, other, most);
                    }
                    for (i64 j = 0; j < seen; j++)
                        sum += *at(scores + j * LANES) =
                            exponentials(*at(scores + j * LANES) - most);
                    lanes share = 1 / sum;
                    for (i64 j = 0; j < seen; j++) *at(scores + j * LANES) *= share;
                    memcpy(kept, &most, some * sizeof(float));
                    memcpy(kept + time, &share, some * sizeof(float));
                    multiply((struct operand){scores, 1, LANES}, values, v_stride, seen,
                             out + place, heads * width, some, width, 0);
                }
        }
    }
}

/* dq (batch, time, heads, width), dk and dv (batch, time, kv_heads, width), from the gradient of
   out (`grad`). Here, `room` is at least 2 * LANES * (time + width). */
void attention_backward(const float *q, const float *k, const float *v, i64 k_stride, i64 v_stride,
                        i64 batch, i64 time, i64 heads, i64 kv_heads, i64 width,
                        const float *sizes, const float *grad, float *dq, float *dk, float *dv,
                        float *scratch, i64 room, int threads) {
    i64 rows = batch * kv_heads, group = heads / kv_heads;
    i64 q_row = heads * width, kv_row = kv_heads * width;
    float scale = 1.0f / sqrtf(width);
    FOR_EACH_PART {
        float *shares = scratch + part * room, *dshares = shares + LANES * time;
        float *queries = dshares + LANES * time, *grads = queries + LANES * width;
        FOR_ROWS_OF_PART {
            i64 text = row / kv_heads, shared = row % kv_heads;
            const float *keys = k + text * time * k_stride + shared * width;
            const float *values = v + text * time * v_stride + shared * width;
            float *dkeys = dk + text * time * kv_row + shared * width;
            float *dvalues = dv + text * time * kv_row + shared * width;
            for (i64 i = 0; i < time; i++) {
                memset(dkeys + i * kv_row, 0, width * sizeof(float));
                memset(dvalues + i * kv_row, 0, width * sizeof(float));
            }
            for (i64 head = shared * group; head < (shared + 1) * group; head++)
                for (i64 i = 0; i < time; i += LANES) {
                    i64 place = ((text * time + i) * heads + head) * width;
                    i64 some = least(LANES, time - i), seen = i + some;
                    const float *kept = sizes + (text * heads + head) * 2 * time + i;
                    lanes most = {0}, share = {0}, along = {0};
                    memcpy(&most, kept, some * sizeof(float));
                    memcpy(&share, kept + time, some * sizeof(float));
                    transpose(q + place, q_row, some, width, scale, queries);
                    transpose(grad + place, q_row, some, width, 1, grads);
                    score(queries, keys, k_stride, i, some, width, shares);
                    multiply((struct operand){values, v_stride, 1}, grads, LANES, width, dshares,
                             LANES, seen, LANES, 0);
                    for (i64 j = 0; j < seen; j++) {
                        lanes *x = at(shares + j * LANES);
                        *x = exponentials(*x - most) * share;
                        along += *x * *at(dshares + j * LANES);
                    }
                    for (i64 j = 0; j < seen; j++) {
                        lanes *dx = at(dshares + j * LANES);
                        *dx = scale * *at(shares + j * LANES) * (*dx - along);
                    }
                    multiply((struct operand){dshares, 1, LANES}, keys, k_stride, seen, dq + place,
                             q_row, some, width, 0);
                    multiply((struct operand){dshares, LANES, 1}, q + place, q_row, some, dkeys,
                             kv_row, seen, width, 1);
                    multiply((struct operand){shares, LANES, 1}, grad + place, q_row, some, dvalues,
                             kv_row, seen, width, 1);
                }
        }
    }
}
