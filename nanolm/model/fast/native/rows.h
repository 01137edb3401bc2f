/* What several kernels use: rows split among threads, an exponential that can be vectorized, sums,
   and rotary positions. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

/* Runs the loop body for the rows of each thread; `part` is the number of the thread. */
#define FOR_EACH_PART                                                   \
    _Pragma("omp parallel for num_threads(threads) if (threads > 1)")   \
    for (int part = 0; part < threads; part++)
/* So that arguments that are constants unroll loops. */
#define ALWAYS_INLINE static inline __attribute__((always_inline))
/* Lets the compiler vectorize a loop that adds to `total`. */
#define PRAGMA(words) _Pragma(#words)
#define SUMS(...) PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#define FOR_ROWS_OF_PART \
    for (i64 row = rows * part / threads; row < rows * (part + 1) / threads; row++)

/* 16 floats, which compilers split where vectors are shorter. */
typedef float sixteen __attribute__((vector_size(64), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16)));

/* The sum, by halves: with SUMS, the compiler would add the numbers one after the other. */
static inline float total(sixteen x) {
    eight halves[2];
    four quarters[2];
    memcpy(halves, &x, sizeof x);
    halves[0] += halves[1];
    memcpy(quarters, halves, sizeof quarters);
    quarters[0] += quarters[1];
    return (quarters[0][0] + quarters[0][1]) + (quarters[0][2] + quarters[0][3]);
}

/* The sum of the products of x and y. */
ALWAYS_INLINE float dot_product(const float *x, const float *y,
                                                               i64 count) {
    sixteen sums = {0};
    float rest = 0;
    i64 i = 0;
    for (; i + 16 <= count; i += 16) sums += *(const sixteen *)(x + i) * *(const sixteen *)(y + i);
    for (; i < count; i++) rest += x[i] * y[i];
    return total(sums) + rest;
}

/* For e^x = 2^n e^r, of a number or a vector: r = x - n ln 2, with ln 2 in two parts, and a Taylor
   polynomial for e^r. */
#define REMAINDER(x, n) (((x) - (n) * 0.693145752f) - (n) * 1.42860677e-6f)
#define TAYLOR(r)                                                                            \
    ((((((((r) * (1.0f / 5040) + 1.0f / 720) * (r) + 1.0f / 120) * (r) + 1.0f / 24) * (r) +  \
        1.0f / 6) * (r) + 0.5f) * (r) + 1.0f) * (r) + 1.0f)

/* e^x = 2^n e^r with r in [-0.35, 0.35]. Unlike expf, the compiler can vectorize it, because only
   integers are compared. Limits x to [-87, 87]. */
static inline float exponential(float x) {
    const int32_t limit = 0x42ae0000; /* 87.0f */
    int32_t bits, magnitude;
    memcpy(&bits, &x, sizeof bits);
    magnitude = bits & INT32_MAX;
    bits = (bits & INT32_MIN) | (magnitude < limit ? magnitude : limit);
    float z, power;
    memcpy(&z, &bits, sizeof z);
    int n = (int)(z * 1.44269504f + copysignf(0.5f, z));
    float r = REMAINDER(z, (float)n);
    bits = (n + 127) << 23;
    memcpy(&power, &bits, sizeof power);
    return TAYLOR(r) * power + (x != x ? x : 0.0f); /* NaN stays NaN */
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* Rotates one head in place: by the positive angle, or by the negative one (sign = -1). */
ALWAYS_INLINE void rotate(float *x, const float *cosines,
                                                         const float *sines, float sign,
                                                         i64 half) {
    float *left = x, *right = x + half;
    i64 i = 0;
    for (; i + 8 <= half; i += 8) {
        eight a = *(eight *)(left + i), b = *(eight *)(right + i);
        eight cosine = *(const eight *)(cosines + i), sine = *(const eight *)(sines + i) * sign;
        *(eight *)(left + i) = a * cosine - b * sine;
        *(eight *)(right + i) = b * cosine + a * sine;
    }
    for (; i < half; i++) {
        float before = left[i], sine = sign * sines[i];
        left[i] = before * cosines[i] - right[i] * sine;
        right[i] = right[i] * cosines[i] + before * sine;
    }
}
