/* What several kernels use: rows split among threads, an exponential that can be vectorized, and
   rotary positions. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int64_t i64;

/* Runs the loop body for the rows of each thread; `part` is the number of the thread. */
#define FOR_EACH_PART                                                   \
    _Pragma("omp parallel for num_threads(threads) if (threads > 1)")   \
    for (int part = 0; part < threads; part++)
/* Lets the compiler vectorize a loop that adds to `total`. */
#define PRAGMA(words) _Pragma(#words)
#define SUMS(...) PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#define FOR_ROWS_OF_PART \
    for (i64 row = rows * part / threads; row < rows * (part + 1) / threads; row++)

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
static inline void rotate(float *x, const float *cosines, const float *sines, float sign,
                          i64 half) {
    float *restrict left = x, *restrict right = x + half;
    for (i64 i = 0; i < half; i++) {
        float before = left[i], sine = sign * sines[i];
        left[i] = before * cosines[i] - right[i] * sine;
        right[i] = right[i] * cosines[i] + before * sine;
    }
}
