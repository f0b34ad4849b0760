// Tanh GELU with the bias of the fc linear in front of it, and its backward pass with that bias's gradient.
//   gelu(u) = 0.5 u (1 + tanh(z)),  z = sqrt(2/pi) (u + 0.044715 u^3)      Hendrycks & Gimpel 2016
// Computed as u s with s = 1 / (1 + e^-2z), which is the same and keeps its digits for negative u.
#ifndef GELU_CUH
#define GELU_CUH

#include "gpu.cuh"

// s = 0.5 (1 + tanh(z)) and dz/du. Error of s: below 3e-7, and below 3e-6 of s where s > 1e-6 (ex2.approx and
// rcp.approx are off by 2 and 1 ulp; three roundings of the exponent count for up to 20 of its units). tanh.approx:
// 5e-4. Beyond |u| = 30, where s is 0 or 1, u^2 is held at 900: nothing overflows.
__device__ static inline float gelu_sigmoid(float u, float* slope) {
    const float c = 0.7978845608f;         // sqrt(2/pi)
    const float exponent = -2.3022081981f; // e^-2z = 2^(exponent * z / c) with exponent = -2 log2(e) c
    float u2 = fminf(u * u, 900.0f);
    *slope = fmaf(3.0f * 0.044715f * c, u2, c);
    return __fdividef(1.0f, 1.0f + exp2_approx(u * fmaf(exponent * 0.044715f, u2, exponent)));
}

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// y (rows, C) = gelu(x + bias) in every form of y;   x (rows, C) BF16, bias (C) BF16
//   bytes    2 read + 2 written per element in FP8: 805 MB at (65536, 3072), 187 us at 4.3 TB/s; memory-bound
//   numerics FP32 inside; FP8 is rounded from the FP32 value, saturating; amax is of y BEFORE scaling
//   threads  256, one patch of 4 x 8 each, tiles of 64 x 128; FP8: rows, C multiples of 16; else C of 8
//   bits     deterministic
template <int FORMS>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    gelu_forward_kernel(FormsOut y, const bf16* x, const bf16* bias, int rows, int C) {
    kernel_begin();
    __shared__ uint4 tile[ELEMENT_COLS * ELEMENT_ROWS / sizeof(uint4)];
    ElementPlace place = element_place();
    float scale = FORMS == FORMS_BOTH || y.slot != NULL ? y.slot->scale : 1.0f, amax = 0.0f, b[8] = {};
    if (place.column < C) { unpack8(b, load_vector(bias + place.column)); }
    uint4 raw[PATCH_ROWS];
    int first_row = blockIdx.y * ELEMENT_ROWS;
    element_load<FORMS>(raw, x, place, first_row, rows, C);
    for (;;) {
        int row = first_row + place.word * PATCH_ROWS;
        size_t at = (size_t)row * C + place.column;
        Fp8Patch patch = {};
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++, at += C) {
            float v[8], slope;
            unpack8(v, raw[r]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float u = v[j] + b[j];
                v[j] = u * gelu_sigmoid(u, &slope);
            }
            emit_row<e4m3, FORMS>(y, &patch, r, v, scale, at, element_inside<FORMS>(place, row, r, rows, C), &amax);
        }
        if (FORMS == FORMS_BOTH || y.transposed != NULL) {
            element_store_transposed(y, (uint32_t*)tile, &patch, place, first_row, rows, C);
        }
        first_row += gridDim.y * ELEMENT_ROWS;
        if (first_row >= rows) { break; }
        __syncthreads();
        element_load<FORMS>(raw, x, place, first_row, rows, C);
    }
    if (y.amax != NULL) { raise_amax(y.amax, amax); }
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) { write_descale(y, scale); }
}

// dx (rows, C) = dy * gelu'(x + bias) in every form of dx;   dy, x (rows, C) BF16, bias (C) BF16; dx.wide may be dy
// partials (gridDim.y, C) FP32 = column sums of the FP32 dx over this block's rows, or NULL
//   gelu' = s + 2 u s (1 - s) z'
//   bytes    4 read + 2 written per element in FP8: 1208 MB at (65536, 3072), 281 us at 4.3 TB/s; memory-bound
//   numerics FP32 inside; FP8 is rounded from the FP32 value, saturating; amax is of dx BEFORE scaling; sums in FP32
//   threads  as gelu_forward_kernel
//   bits     deterministic: sums in fixed order
template <int FORMS>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    gelu_backward_kernel(FormsOut dx, float* partials, const bf16* dy, const bf16* x, const bf16* bias, int rows,
                         int C) {
    kernel_begin();
    __shared__ uint4 tile[ELEMENT_COLS * ELEMENT_ROWS / sizeof(uint4)];
    ElementPlace place = element_place();
    float scale = FORMS == FORMS_BOTH || dx.slot != NULL ? dx.slot->scale : 1.0f;
    uint4 raw_bias = make_uint4(0, 0, 0, 0);
    if (place.column < C) { raw_bias = load_vector(bias + place.column); }
    float sums[8] = {};
    float amax = 0.0f;
    uint4 raw_x[PATCH_ROWS], raw_dy[PATCH_ROWS];
    int first_row = blockIdx.y * ELEMENT_ROWS;
    element_load<FORMS>(raw_x, x, place, first_row, rows, C);
    element_load<FORMS>(raw_dy, dy, place, first_row, rows, C);
    for (;;) {
        int row = first_row + place.word * PATCH_ROWS;
        size_t at = (size_t)row * C + place.column;
        Fp8Patch patch = {};
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++, at += C) {
            float v[8], b[8], d[8]; // of a row that does not exist: d and v are 0
            unpack8(v, raw_x[r]);
            unpack8(b, raw_bias);
            unpack8(d, raw_dy[r]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float u = v[j] + b[j], slope;
                float s = gelu_sigmoid(u, &slope);
                v[j] = d[j] * fmaf(2.0f * u, (s - s * s) * slope, s);
                sums[j] += v[j];
            }
            emit_row<e5m2, FORMS>(dx, &patch, r, v, scale, at, element_inside<FORMS>(place, row, r, rows, C), &amax);
        }
        if (FORMS == FORMS_BOTH || dx.transposed != NULL) {
            element_store_transposed(dx, (uint32_t*)tile, &patch, place, first_row, rows, C);
        }
        first_row += gridDim.y * ELEMENT_ROWS;
        if (first_row >= rows) { break; }
        __syncthreads();
        element_load<FORMS>(raw_x, x, place, first_row, rows, C);
        element_load<FORMS>(raw_dy, dy, place, first_row, rows, C);
    }
    if (partials != NULL) {
        int first_column = blockIdx.x * ELEMENT_COLS;
        block_column_sums(partials + (size_t)blockIdx.y * C + first_column, (float*)tile, sums, 1, place.word,
                          place.group, ELEMENT_ROWS / PATCH_ROWS, ELEMENT_GROUPS, min(ELEMENT_COLS, C - first_column));
    }
    if (dx.amax != NULL) { raise_amax(dx.amax, amax); }
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) { write_descale(dx, scale); }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

static inline void gelu_forward_launch(Device* dev, FormsOut y, const bf16* x, const bf16* bias, int rows, int C) {
    auto kernel = forms_are_both(y) ? gelu_forward_kernel<FORMS_BOTH> : gelu_forward_kernel<FORMS_ANY>;
    launch(dev, kernel, element_grid(rows, C, 0), ELEMENT_THREADS, 0, y, x, bias, rows, C);
}

static inline void gelu_backward_launch(Device* dev, FormsOut dx, float* partials, const bf16* dy, const bf16* x,
                                        const bf16* bias, int rows, int C) {
    auto kernel = forms_are_both(dx) ? gelu_backward_kernel<FORMS_BOTH> : gelu_backward_kernel<FORMS_ANY>;
    launch(dev, kernel, element_grid(rows, C, 1), ELEMENT_THREADS, 0, dx, partials, dy, x, bias, rows, C);
}

void gelu_forward(Device* dev, E4m3Tensor y, const bf16* x, const bf16* bias, int rows, int C) {
    cost_gelu_forward(dev, y, rows, C);
    FormsOut out = forms_of_e4m3(y);
    int fp8 = y.data != NULL || y.transposed != NULL;
    check_forms("gelu_forward", out, y.slot, fp8, rows, C);
    if (fp8 && y.measure_first) {
        gelu_forward_launch(dev, measure_begin(dev, out), x, bias, rows, C);
        measure_end(dev, out, y.recipe);
    }
    gelu_forward_launch(dev, out, x, bias, rows, C);
}

void gelu_backward(Device* dev, E5m2Tensor dx, float* dbias, const bf16* dy, const bf16* x, const bf16* bias, int rows,
                   int C) {
    cost_gelu_backward(dev, dx, rows, C);
    FormsOut out = forms_of_e5m2(dx);
    int fp8 = dx.data != NULL || dx.transposed != NULL;
    check_forms("gelu_backward", out, dx.slot, fp8, rows, C);
    int strips = (int)element_grid(rows, C, 1).y;
    float* partials = dbias == NULL ? NULL : workspace_floats(dev, "gelu_backward", (size_t)strips * C);
    if (fp8 && dx.measure_first) {
        gelu_backward_launch(dev, measure_begin(dev, out), NULL, dy, x, bias, rows, C);
        measure_end(dev, out, dx.recipe);
    }
    gelu_backward_launch(dev, out, partials, dy, x, bias, rows, C);
    if (dbias != NULL) { column_sums_add(dev, ColumnSums{{dbias, NULL, NULL}}, 1, partials, strips, C); }
}

#endif
