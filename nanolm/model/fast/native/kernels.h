/* The kernels that both Python and `blocks.c` call. */

#include "rows.h"

void add_norm(const float *x, const float *y, const float *weight, const float *bias, float epsilon,
              i64 layer, i64 rows, i64 dim, float *total, float *out, float *stats, int threads);
void add_norm_backward(const float *total, const float *weight, const float *stats,
                       const float *grad, const float *later, i64 layer, i64 rows, i64 dim,
                       float *dx, float *sums, int threads);
void qk_norm_rope(const float *qkv, const float *query_weight, const float *key_weight,
                  const float *cosines, const float *sines, float epsilon, i64 rows, i64 time,
                  i64 heads, i64 kv_heads, i64 width, float *q, float *k, int threads);
void qk_norm_rope_backward(const float *qkv, const float *query_weight, const float *key_weight,
                           const float *cosines, const float *sines, float epsilon, i64 rows,
                           i64 time, i64 heads, i64 kv_heads, i64 width, const float *dq,
                           const float *dk, const float *dv, float *dqkv, float *sums,
                           int threads);
void attention(const float *q, const float *k, const float *v, i64 k_stride, i64 v_stride,
               i64 batch, i64 time, i64 heads, i64 kv_heads, i64 width, float *out, float *sizes,
               float *scratch, i64 room, int threads);
void attention_backward(const float *q, const float *k, const float *v, i64 k_stride, i64 v_stride,
                        i64 batch, i64 time, i64 heads, i64 kv_heads, i64 width,
                        const float *sizes, const float *grad, float *dq, float *dk, float *dv,
                        float *scratch, i64 room, int threads);

typedef void activation(const float *x, i64 rows, i64 width, float *out, int threads);
typedef void activation_backward(const float *x, const float *grad, i64 rows, i64 width, float *dx,
                                 int threads);
activation swiglu, gelu_tanh, gelu;
activation_backward swiglu_backward, gelu_tanh_backward, gelu_backward;
