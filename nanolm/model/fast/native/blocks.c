/* All blocks of a model in one call, for training on a CPU.

   Each thread takes some of the texts through all layers, so that no thread waits for another
   before the end of the pass. Matrix products are computed by torch's own `sgemm`. */

#include "kernels.h"

typedef void gemm(const char *, const char *, const int *, const int *, const int *, const float *,
                  const float *, const int *, const float *, const int *, const float *, float *,
                  const int *);

/* All fields have 8 bytes: blocks.py passes them as numbers. A null pointer
   means: no such bias, norm of queries or keys, rotation, or dropout. */
struct layer {
    const float *weight, *bias;
};
struct block {
    struct layer attention_norm, feed_forward_norm;
    const float *query_weight, *key_weight;
    struct layer down, up, out, qkv;
    const float *attention_dropout, *feed_forward_dropout; /* factors of their outputs */
    float *kept; /* see `take_kept` */
    i64 rotated;
};
struct stack {
    const struct block *blocks;
    const float *cosines, *sines; /* (time, width) */
    gemm *multiply;
    struct layer norm; /* the last one */
    float *last;       /* its input and its statistics, (batch, time, dim) and (batch, time, 2) */
    i64 count, batch, time, dim, heads, kv_heads, width, hidden, gated, nonlinearity, has_mean;
    double epsilon;
};

enum { SWIGLU, GELU_TANH, GELU }; /* as in blocks.py */
static activation *const activate[] = {swiglu, gelu_tanh, gelu};
static activation_backward *const activate_backward[] = {swiglu_backward, gelu_tanh_backward,
                                                         gelu_backward};

/* What the backward pass needs of each token. */
struct kept {
    float *total, *normed, *stats, *qkv, *q, *k, *mixed, *sizes; /* attention */
    float *between, *normed_between, *stats_between, *up, *active; /* feed-forward */
};

/* Takes `width` floats per token from a buffer for all tokens; returns those from row `first`. */
static float *take(float **buffer, i64 rows, i64 first, i64 width) {
    float *start = *buffer;
    *buffer += rows * width;
    return start + first * width;
}

static struct kept take_kept(const struct stack *s, const struct block *b, i64 first) {
    i64 rows = s->batch * s->time, dim = s->dim, q = s->heads * s->width;
    float *rest = b->kept;
    struct kept kept;
    kept.total = take(&rest, rows, first, dim);
    kept.normed = take(&rest, rows, first, dim);
    kept.stats = take(&rest, rows, first, 2);
    kept.qkv = take(&rest, rows, first, q + 2 * s->kv_heads * s->width);
    kept.q = take(&rest, rows, first, q);
    kept.k = take(&rest, rows, first, s->kv_heads * s->width);
    kept.mixed = take(&rest, rows, first, q);
    kept.sizes = take(&rest, rows, first, 2 * s->heads);
    kept.between = take(&rest, rows, first, dim);
    kept.normed_between = take(&rest, rows, first, dim);
    kept.stats_between = take(&rest, rows, first, 2);
    kept.up = take(&rest, rows, first, s->hidden * (1 + s->gated));
    kept.active = take(&rest, rows, first, s->hidden);
    return kept;
}

/* out (rows, columns) = factor * out + left @ right. Transposed means that `left` is stored as
   (count, rows), or `right` as (columns, count). */
static void multiply(const struct stack *s, const float *left, int left_transposed,
                     const float *right, int right_transposed, i64 rows, i64 columns, i64 count,
                     float factor, float *out) {
    /* sgemm stores matrices by columns, so it computes the transposed product. */
    const int m = columns, n = rows, k = count;
    const int right_stride = right_transposed ? k : m, left_stride = left_transposed ? n : k;
    const float one = 1;
    s->multiply(right_transposed ? "T" : "N", left_transposed ? "T" : "N", &m, &n, &k, &one, right,
                &right_stride, left, &left_stride, &factor, out, &m);
}

/* y = x @ weight.T + bias */
static void forward(const struct stack *s, const struct layer *l, i64 rows, const float *x,
                    i64 inputs, float *y, i64 outputs) {
    if (l->bias)
        for (i64 row = 0; row < rows; row++)
            memcpy(y + row * outputs, l->bias, outputs * sizeof(float));
    multiply(s, x, 0, l->weight, 1, rows, outputs, inputs, l->bias != NULL, y);
}

/* y += x, after multiplying y by the factors unless they are null */
static void add_residual(const float *x, const float *factors, i64 count, float *y) {
    if (factors)
        for (i64 i = 0; i < count; i++) y[i] = x[i] + factors[i] * y[i];
    else
        for (i64 i = 0; i < count; i++) y[i] += x[i];
}

/* dy times the factors; dy itself if they are null */
static const float *dropped(const float *dy, const float *factors, i64 count, float *out) {
    if (!factors) return dy;
    for (i64 i = 0; i < count; i++) out[i] = factors[i] * dy[i];
    return out;
}

/* The factors of row `start` and the next ones, or null. */
static const float *from_row(const float *factors, i64 start, i64 dim) {
    return factors ? factors + start * dim : NULL;
}

/* dx, the gradient of the weight, and after it that of the bias. Returns where these end. */
static float *backward(const struct stack *s, const struct layer *l, i64 rows, const float *x,
                       i64 inputs, const float *dy, i64 outputs, float *dx, float *dweight) {
    float *dbias = dweight + outputs * inputs;
    multiply(s, dy, 0, l->weight, 0, rows, inputs, outputs, 0, dx);
    multiply(s, dy, 1, x, 0, outputs, inputs, rows, 0, dweight);
    if (!l->bias) return dbias;
    memset(dbias, 0, outputs * sizeof(float));
    for (i64 row = 0; row < rows; row++)
        for (i64 i = 0; i < outputs; i++) dbias[i] += dy[row * outputs + i];
    return dbias + outputs;
}

/* The first token of a thread's texts, and their number. */
static i64 first_token(const struct stack *s, int part, int threads, i64 *texts) {
    i64 first = s->batch * part / threads;
    *texts = s->batch * (part + 1) / threads - first;
    return first * s->time;
}

/* All blocks and the last norm: y (batch, time, dim) from x */
void transform(const struct stack *s, const float *x, float *y, float *scratch, i64 room,
            int threads) {
    i64 all = s->batch * s->time, dim = s->dim, hidden = s->hidden, up = hidden * (1 + s->gated);
    i64 q = s->heads * s->width, kv = s->kv_heads * s->width, qkv = q + 2 * kv;
    FOR_EACH_PART {
        i64 texts, start = first_token(s, part, threads, &texts), count = texts * s->time;
        float *last = s->last + start * dim, *last_stats = s->last + all * dim + start * 2;
        for (i64 l = 0; l < s->count; l++) {
            const struct block *b = s->blocks + l;
            struct kept k = take_kept(s, b, start);
            if (l == 0) memcpy(k.total, x + start * dim, count * dim * sizeof(float));
            add_norm(k.total, NULL, b->attention_norm.weight, b->attention_norm.bias, s->epsilon,
                     s->has_mean, count, dim, k.total, k.normed, k.stats, 1);
            forward(s, &b->qkv, count, k.normed, dim, k.qkv, qkv);
            if (b->rotated) {
                qk_norm_rope(k.qkv, b->query_weight, b->key_weight, s->cosines, s->sines,
                             s->epsilon, count, s->time, s->heads, s->kv_heads, s->width, k.q, k.k,
                             1);
            } else {
                for (i64 row = 0; row < count; row++) {
                    memcpy(k.q + row * q, k.qkv + row * qkv, q * sizeof(float));
                    memcpy(k.k + row * kv, k.qkv + row * qkv + q, kv * sizeof(float));
                }
            }
            attention(k.q, k.k, k.qkv + q + kv, kv, qkv, texts, s->time, s->heads, s->kv_heads,
                      s->width, k.mixed, k.sizes, scratch + part * room, room, 1);
            forward(s, &b->out, count, k.mixed, q, k.between, dim);
            add_residual(k.total, from_row(b->attention_dropout, start, dim), count * dim,
                         k.between);
            add_norm(k.between, NULL, b->feed_forward_norm.weight, b->feed_forward_norm.bias,
                     s->epsilon, s->has_mean, count, dim, k.between, k.normed_between,
                     k.stats_between, 1);
            forward(s, &b->up, count, k.normed_between, dim, k.up, up);
            activate[s->nonlinearity](k.up, count, hidden, k.active, 1);
            float *next = l + 1 < s->count ? take_kept(s, b + 1, start).total : last;
            forward(s, &b->down, count, k.active, hidden, next, dim);
            add_residual(k.between, from_row(b->feed_forward_dropout, start, dim), count * dim,
                         next);
        }
        add_norm(last, NULL, s->norm.weight, s->norm.bias, s->epsilon, s->has_mean, count, dim,
                 last, y + start * dim, last_stats, 1);
    }
}

/* dx from dy, and the gradients of all weights (size,): for each block, those of the norms (weight
   and bias, used or not), of the norms of queries and keys, and of its matrices, in the order of
   `struct block`; then those of the last norm. Each thread first adds up those of its texts, the
   first one in `gradients` and the others in `others` (threads - 1, size). `temporary` has room
   for the gradients of activations. */
void transform_backward(const struct stack *s, const float *dy, float *dx, float *temporary,
                        float *gradients, float *others, i64 size, float *scratch, i64 room,
                        int threads) {
    i64 all = s->batch * s->time, dim = s->dim, hidden = s->hidden, up = hidden * (1 + s->gated);
    i64 q = s->heads * s->width, kv = s->kv_heads * s->width, qkv = q + 2 * kv;
    FOR_EACH_PART {
        i64 texts, start = first_token(s, part, threads, &texts), count = texts * s->time;
        float *own = part ? others + (part - 1) * size : gradients, *of_last = own + size - 2 * dim;
        float *rest = temporary, *d = dx + start * dim;
        float *dbetween = take(&rest, all, start, dim), *dnormed = take(&rest, all, start, dim);
        float *dactive = take(&rest, all, start, hidden), *dup = take(&rest, all, start, up);
        float *dmixed = take(&rest, all, start, q), *dqkv = take(&rest, all, start, qkv);
        float *dq = take(&rest, all, start, q), *dk = take(&rest, all, start, kv);
        float *dv = take(&rest, all, start, kv), *ddropped = take(&rest, all, start, dim);
        add_norm_backward(s->last + start * dim, s->norm.weight, s->last + all * dim + start * 2,
                          dy + start * dim, NULL, s->has_mean, count, dim, d, of_last, 1);
        for (i64 l = s->count - 1; l >= 0; l--) {
            const struct block *b = s->blocks + l;
            struct kept k = take_kept(s, b, start);
            float *of_norms = own + l * ((size - 2 * dim) / s->count);
            float *of_heads = of_norms + 4 * dim, *next = of_heads + 2 * s->width;
            const float *dy_of_layer = dropped(d, from_row(b->feed_forward_dropout, start, dim),
                                               count * dim, ddropped);
            next = backward(s, &b->down, count, k.active, hidden, dy_of_layer, dim, dactive, next);
            activate_backward[s->nonlinearity](k.up, dactive, count, hidden, dup, 1);
            next = backward(s, &b->up, count, k.normed_between, dim, dup, up, dnormed, next);
            add_norm_backward(k.between, b->feed_forward_norm.weight, k.stats_between, dnormed, d,
                              s->has_mean, count, dim, dbetween, of_norms + 2 * dim, 1);
            dy_of_layer = dropped(dbetween, from_row(b->attention_dropout, start, dim),
                                  count * dim, ddropped);
            next = backward(s, &b->out, count, k.mixed, q, dy_of_layer, dim, dmixed, next);
            attention_backward(k.q, k.k, k.qkv + q + kv, kv, qkv, texts, s->time, s->heads,
                               s->kv_heads, s->width, k.sizes, dmixed, dq, dk, dv,
                               scratch + part * room, room, 1);
            if (b->rotated) {
                qk_norm_rope_backward(k.qkv, b->query_weight, b->key_weight, s->cosines, s->sines,
                                      s->epsilon, count, s->time, s->heads, s->kv_heads, s->width,
                                      dq, dk, dv, dqkv, of_heads, 1);
            } else {
                for (i64 row = 0; row < count; row++) {
                    float *to = dqkv + row * qkv;
                    memcpy(to, dq + row * q, q * sizeof(float));
                    memcpy(to + q, dk + row * kv, kv * sizeof(float));
                    memcpy(to + q + kv, dv + row * kv, kv * sizeof(float));
                }
            }
            backward(s, &b->qkv, count, k.normed, dim, dqkv, qkv, dnormed, next);
            add_norm_backward(k.total, b->attention_norm.weight, k.stats, dnormed, dbetween,
                              s->has_mean, count, dim, d, of_norms, 1);
        }
    }
    FOR_EACH_PART {
        i64 start = size * part / threads, end = size * (part + 1) / threads;
        for (int other = 0; other < threads - 1; other++)
            for (i64 i = start; i < end; i++) gradients[i] += others[other * size + i];
    }
}
