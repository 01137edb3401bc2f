/* The next token of one text on a CPU: a whole step in one call.

   Reading the weights takes most of the time, so each row is read in order and fetched in advance.
   The threads share the rows of each matrix, and meet after it. Vectors that are multiplied by
   a matrix end in zeros, up to a multiple of 64. */

#include <omp.h>
#include <sched.h>

#include "rows.h"

enum { LANES = 16, TOGETHER = 4 /* rows of x */, AHEAD = 4096 /* bytes */, PATIENCE = 4000 };
typedef sixteen lanes;
typedef int32_t integers __attribute__((vector_size(LANES * sizeof(float))));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

/* All fields have 8 bytes: decoding.py passes them as numbers. Pointers may be null. */
struct matrix {
    const uint8_t *weight;
    const uint16_t *scale; /* bfloat16 */
    const float *bias;
    i64 inputs, outputs, bits;
};
struct norm {
    const float *weight, *bias;
};
struct layer {
    struct norm attention_norm, query_norm, key_norm, feed_forward_norm;
    struct matrix qkv, out, up, down;
    float *keys, *values; /* (kv_heads, length, width) */
    i64 rotated;
};
struct decoder {
    const struct layer *layers;
    const float *tokens, *positions, *cosines, *sines; /* tables */
    struct norm norm;
    struct matrix head;
    float *scratch; /* shared by all threads, then `room` floats of each */
    i64 room, threads, count, dim, heads, kv_heads, width, hidden, length, nonlinearity, has_mean;
    double epsilon;
};
struct meeting {
    int arrived, round; /* threads now, and meetings so far */
};

static inline lanes at(const float *x) { return *(const lanes *)x; }
static inline i64 padded(i64 count) { return (count + 63) / 64 * 64; }

static inline float from_bfloat16(uint16_t high) {
    uint32_t bits = (uint32_t)high << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Unlike signed ones, compilers vectorize the conversion of unsigned bytes. */
static inline lanes converted(bytes x) {
    return __builtin_convertvector(__builtin_convertvector(x, integers), lanes);
}
static inline lanes load(const uint8_t *w, const int size) {
    if (size == 4) return at((const float *)w);
    return converted(*(const bytes *)w ^ 128) - 128;
}

/* The product of x and one row of weights, of 4 bytes or 1. */
ALWAYS_INLINE float dot(const uint8_t *w, const int size, i64 inputs,
                                                       const float *x) {
    lanes sums[4] = {0};
    i64 i = 0;
    for (; i + 4 * LANES <= inputs; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            const uint8_t *from = w + (i + j * LANES) * size;
            if (size == 4 || j == 0) __builtin_prefetch(from + AHEAD);
            sums[j] += load(from, size) * at(x + i + j * LANES);
        }
    for (; i + LANES <= inputs; i += LANES) sums[0] += load(w + i * size, size) * at(x + i);
    float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < inputs; i++) sum += ((const float *)w)[i] * x[i]; /* others are padded */
    return sum;
}

/* The products of a row of 4-bit weights and `count` rows of x; they are `stride` floats apart. Of
   each 32 weights, the first half are the low halves of 16 bytes. */
ALWAYS_INLINE void dots4(const uint8_t *w, const uint16_t *scale,
                                                        i64 inputs, const float *x, const int count,
                                                        float *out, i64 stride) {
    lanes sums[TOGETHER][2] = {0};
    for (i64 i = 0, groups = inputs / (2 * LANES); i < groups; i++) {
        int32_t pair; /* a scale, and in the upper half a minimum */
        memcpy(&pair, scale + 2 * i, sizeof pair);
        integers pairs = pair - (integers){0};
        lanes step = (lanes)(pairs << 16), low = (lanes)(pairs & -65536);
        bytes both = *(const bytes *)(w + LANES * i);
        lanes first = converted(both & 15) * step + low, second = converted(both >> 4) * step + low;
        __builtin_prefetch(w + LANES * i + AHEAD);
        for (int r = 0; r < count; r++) {
            sums[r][0] += first * at(x + r * inputs + 2 * LANES * i);
            sums[r][1] += second * at(x + r * inputs + 2 * LANES * i + LANES);
        }
    }
    for (int r = 0; r < count; r++) out[r * stride] = total(sums[r][0] + sums[r][1]);
}

/* One output. */
static inline float product(const struct matrix *m, i64 row, const float *x) {
    const uint8_t *w = m->weight + row * m->inputs * m->bits / 8;
    float y;
    if (m->bits == 32) y = dot(w, 4, m->inputs, x);
    else if (m->bits == 8) y = dot(w, 1, m->inputs, x) * from_bfloat16(m->scale[row]);
    else dots4(w, m->scale + row * m->inputs / LANES, m->inputs, x, 1, &y, 0);
    return m->bias ? y + m->bias[row] : y;
}

/* 4-bit weights in float32: out (outputs, inputs) */
void unpack(const struct matrix *m, float *out, int threads) {
    i64 rows = m->outputs, groups = m->inputs / (2 * LANES);
    FOR_EACH_PART FOR_ROWS_OF_PART for (i64 group = row * groups; group < (row + 1) * groups;
                                        group++) {
        lanes *to = (lanes *)(out + 2 * LANES * group);
        float step = from_bfloat16(m->scale[2 * group]);
        float low = from_bfloat16(m->scale[2 * group + 1]);
        bytes both = *(const bytes *)(m->weight + LANES * group);
        to[0] = converted(both & 15) * step + low;
        to[1] = converted(both >> 4) * step + low;
    }
}

/* y (count, outputs) = x (count, padded inputs) times 4-bit weights. */
void multiply(const struct matrix *m, const float *x, i64 count, float *y, int threads) {
    i64 rows = m->outputs, inputs = m->inputs;
    FOR_EACH_PART FOR_ROWS_OF_PART {
        const uint8_t *w = m->weight + row * inputs / 2;
        const uint16_t *scale = m->scale + row * inputs / LANES;
        i64 i = 0;
        for (; i + TOGETHER <= count; i += TOGETHER)
            dots4(w, scale, inputs, x + i * inputs, TOGETHER, y + i * rows + row, rows);
        for (; i < count; i++) dots4(w, scale, inputs, x + i * inputs, 1, y + i * rows + row, rows);
    }
}

static void normalize(const struct decoder *d, struct norm norm, const float *x, i64 width,
                      float *out) {
    float mean = 0, squares = 0;
    if (d->has_mean) {
        SUMS(mean) for (i64 i = 0; i < width; i++) mean += x[i];
        mean /= width;
    }
    SUMS(squares) for (i64 i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
    float scale = 1.0f / sqrtf(squares / width + (float)d->epsilon);
    for (i64 i = 0; i < width; i++) out[i] = (x[i] - mean) * scale * norm.weight[i];
    if (norm.bias) for (i64 i = 0; i < width; i++) out[i] += norm.bias[i];
}

/* The norm and the rotation of a query or key, in place. */
static void prepare(const struct decoder *d, const struct layer *layer, struct norm norm,
                    i64 position, float *x) {
    i64 width = d->width;
    if (norm.weight) normalize(d, norm, x, width, x);
    if (d->cosines && layer->rotated)
        rotate(x, d->cosines + position * width, d->sines + position * width, 1, width / 2);
}

/* One head of keys and values, and the queries that attend to it. */
static void attend(const struct decoder *d, const struct layer *layer, i64 head, i64 position,
                   float *qkv, float *y, float *scores) {
    i64 width = d->width, group = d->heads / d->kv_heads, seen = position + 1;
    i64 size = width * sizeof(float), before = head * d->length * width;
    float *k = qkv + (d->heads + head) * width, *v = k + d->kv_heads * width;
    float *keys = layer->keys + before, *values = layer->values + before;
    prepare(d, layer, layer->key_norm, position, k);
    memcpy(keys + position * width, k, size);
    memcpy(values + position * width, v, size);
    for (i64 query = head * group; query < (head + 1) * group; query++) {
        float *q = qkv + query * width, *out = y + query * width, most = -INFINITY, sum = 0;
        prepare(d, layer, layer->query_norm, position, q);
        for (i64 i = 0; i < seen; i++) {
            scores[i] = dot((const uint8_t *)(keys + i * width), 4, width, q) / sqrtf(width);
            most = scores[i] > most ? scores[i] : most;
        }
        for (i64 i = 0; i < seen; i++) scores[i] = exponential(scores[i] - most);
        SUMS(sum) for (i64 i = 0; i < seen; i++) sum += scores[i];
        memset(out, 0, size);
        for (i64 i = 0; i < seen; i++) {
            float share = scores[i] / sum;
            for (i64 j = 0; j < width; j++) out[j] += share * values[i * width + j];
        }
    }
}

enum { RELU, GELU, GELU_TANH, RELU2, SILU, SWIGLU }; /* as NONLINEARITIES */
static inline float nonlinear(i64 kind, float x) {
    switch (kind) {
        case RELU: return x > 0 ? x : 0;
        case RELU2: return x > 0 ? x * x : 0;
        case GELU: return 0.5f * x * (1 + erff(x * 0.70710678f));
        case GELU_TANH: return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
        default: return x * sigmoid(x);
    }
}

/* Waits for all threads: PATIENCE checks, so that they go on at once, then leaving the core to
   others. */
static void meet(struct meeting *m, int threads) {
    int round = __atomic_load_n(&m->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&m->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        m->arrived = 0;
        __atomic_store_n(&m->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int checks = 0; __atomic_load_n(&m->round, __ATOMIC_ACQUIRE) == round; checks++)
        if (checks > PATIENCE) sched_yield();
}

/* The logits after token `id` at this position. */
void decode(const struct decoder *d, i64 id, i64 position, float *logits, int available) {
    i64 dim = d->dim, heads = d->heads, kv_heads = d->kv_heads, hidden = d->hidden;
    float *x = d->scratch, *qkv = x + padded(dim);
    float *y = qkv + padded((heads + 2 * kv_heads) * d->width), *h = y + padded(heads * d->width);
    struct meeting meeting = {0, 0};
    int wanted = available < d->threads ? available : d->threads; /* there is no more scratch */
    for (i64 i = 0; i < dim; i++)
        x[i] = d->tokens[id * dim + i] + (d->positions ? d->positions[position * dim + i] : 0);
#pragma omp parallel num_threads(wanted) if (wanted > 1)
    {
        int part = omp_get_thread_num(), threads = omp_get_num_threads();
        float *input = h + padded(hidden) + part * d->room, *scores = input + padded(dim);
        i64 rows;
        for (i64 l = 0; l < d->count; l++) {
            const struct layer *layer = d->layers + l;
            normalize(d, layer->attention_norm, x, dim, input);
            rows = layer->qkv.outputs;
            FOR_ROWS_OF_PART qkv[row] = product(&layer->qkv, row, input);
            meet(&meeting, threads);
            rows = kv_heads;
            FOR_ROWS_OF_PART attend(d, layer, row, position, qkv, y, scores);
            meet(&meeting, threads);
            rows = dim;
            FOR_ROWS_OF_PART x[row] += product(&layer->out, row, y);
            meet(&meeting, threads);
            normalize(d, layer->feed_forward_norm, x, dim, input);
            rows = hidden;
            FOR_ROWS_OF_PART {
                h[row] = nonlinear(d->nonlinearity, product(&layer->up, row, input));
                if (d->nonlinearity == SWIGLU) h[row] *= product(&layer->up, hidden + row, input);
            }
            meet(&meeting, threads);
            rows = dim;
            FOR_ROWS_OF_PART x[row] += product(&layer->down, row, h);
            meet(&meeting, threads);
        }
        normalize(d, d->norm, x, dim, input);
        rows = d->head.outputs;
        FOR_ROWS_OF_PART logits[row] = product(&d->head, row, input);
    }
}
