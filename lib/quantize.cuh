// BF16 or FP32 -> FP8 where no fused producer exists: the weights, and what attention has not written in FP8 itself
// (cuDNN's, other head sizes, a scale that is measured first).
#ifndef QUANTIZE_CUH
#define QUANTIZE_CUH

#include "gpu.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// y.data (rows, cols), y.transposed (cols, rows) FP8 = sat(x * scale);   x (rows, cols) BF16
// partials (gridDim.y, cols) FP32 = column sums of x over this block's rows, or NULL
//   bytes    2 read + 2 written per element: 201 MB at (65536, 768), 47 us at 4.3 TB/s; memory-bound
//   numerics one rounding, of x * scale, to nearest even, saturating; amax is of x BEFORE scaling; sums in FP32
//   threads  256, one patch of 4 x 8 each, tiles of 64 x 128; FP8: rows, cols multiples of 16; else cols of 8
//   bits     deterministic: sums in fixed order
template <typename FP8, int FORMS>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    quantize_kernel(FormsOut y, float* partials, const bf16* x, int rows, int cols) {
    kernel_begin();
    __shared__ uint4 tile[ELEMENT_COLS * ELEMENT_ROWS / sizeof(uint4)];
    ElementPlace place = element_place();
    float scale = FORMS == FORMS_BOTH || y.slot != NULL ? y.slot->scale : 1.0f;
    float sums[8] = {};
    float amax = 0.0f;
    uint4 raw[PATCH_ROWS];
    int first_row = blockIdx.y * ELEMENT_ROWS;
    element_load<FORMS>(raw, x, place, first_row, rows, cols);
    for (;;) {
        int row = first_row + place.word * PATCH_ROWS;
        size_t at = (size_t)row * cols + place.column;
        Fp8Patch patch = {};
#pragma unroll
        for (int r = 0; r < PATCH_ROWS; r++, at += cols) {
            float v[8];
            unpack8(v, raw[r]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                sums[j] += v[j];
            }
            emit_row<FP8, FORMS>(y, &patch, r, v, scale, at, element_inside<FORMS>(place, row, r, rows, cols), &amax);
        }
        if (FORMS == FORMS_BOTH || y.transposed != NULL) {
            element_store_transposed(y, (uint32_t*)tile, &patch, place, first_row, rows, cols);
        }
        first_row += gridDim.y * ELEMENT_ROWS;
        if (first_row >= rows) { break; }
        __syncthreads();
        element_load<FORMS>(raw, x, place, first_row, rows, cols);
    }
    if (partials != NULL) {
        int first_column = blockIdx.x * ELEMENT_COLS;
        block_column_sums(partials + (size_t)blockIdx.y * cols + first_column, (float*)tile, sums, 1, place.word,
                          place.group, ELEMENT_ROWS / PATCH_ROWS, ELEMENT_GROUPS,
                          min(ELEMENT_COLS, cols - first_column));
    }
    if (y.amax != NULL) { raise_amax(y.amax, amax); }
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) { write_descale(y, scale); }
}

// w.data (OC, C), w.transposed (C, OC) E4M3 = sat(master * scale);   master (OC, C) FP32
//   bytes    4 read + 2 written per weight: 61 MB at (6400, 1600), 14 us at 4.3 TB/s; memory-bound
//   numerics one rounding, saturating; no amax: the optimizer has taken it
//   threads  as quantize_kernel, one tile per block
template <int FORMS>
__global__ void __launch_bounds__(ELEMENT_THREADS)
    quantize_weight_kernel(FormsOut w, const float* master, int OC, int C) {
    kernel_begin();
    __shared__ uint4 tile[ELEMENT_COLS * ELEMENT_ROWS / sizeof(uint4)];
    ElementPlace place = element_place();
    float scale = w.slot->scale;
    int first_row = blockIdx.y * ELEMENT_ROWS, row = first_row + place.word * PATCH_ROWS; // 65535 tiles are enough
    int inside = row < OC && place.column < C; // OC is a multiple of 16: a patch is in or out
    size_t at = (size_t)row * C + place.column;
    float4 values[PATCH_ROWS][2] = {};
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++) {
        if (inside) {
            const float4* from = (const float4*)(master + at + (size_t)r * C);
            values[r][0] = from[0];
            values[r][1] = from[1];
        }
    }
    Fp8Patch patch = {};
    float amax = 0.0f; // not wanted, drops out
#pragma unroll
    for (int r = 0; r < PATCH_ROWS; r++, at += C) {
        float v[8] = {values[r][0].x, values[r][0].y, values[r][0].z, values[r][0].w,
                      values[r][1].x, values[r][1].y, values[r][1].z, values[r][1].w};
        emit_row<e4m3, FORMS>(w, &patch, r, v, scale, at, inside, &amax);
    }
    if (FORMS == FORMS_BOTH || w.transposed != NULL) {
        element_store_transposed(w, (uint32_t*)tile, &patch, place, first_row, OC, C);
    }
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) { write_descale(w, scale); }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

template <typename FP8>
static inline void quantize_launch(Device* dev, FormsOut y, float* partials, const bf16* x, int rows, int cols) {
    auto kernel = forms_are_both(y) ? quantize_kernel<FP8, FORMS_BOTH> : quantize_kernel<FP8, FORMS_ANY>;
    launch(dev, kernel, element_grid(rows, cols, partials != NULL), ELEMENT_THREADS, 0, y, partials, x, rows, cols);
}

void quantize_forward(Device* dev, E4m3Tensor y, int rows, int cols) {
    if (y.data == NULL && y.transposed == NULL) { return; }
    cost_quantize_forward(dev, y, rows, cols);
    const bf16* x = y.wide;
    FormsOut out = forms_of_e4m3(y);
    check_forms("quantize_forward", out, y.slot, 1, rows, cols);
    check(x != NULL, "quantize_forward: no BF16 form to read");
    out.wide = NULL; // an input here
    if (y.measure_first) {
        quantize_launch<e4m3>(dev, measure_begin(dev, out), NULL, x, rows, cols);
        measure_end(dev, out, y.recipe);
    }
    quantize_launch<e4m3>(dev, out, NULL, x, rows, cols);
}

void quantize_backward(Device* dev, E5m2Tensor dy, float* dbias, int rows, int cols) {
    cost_quantize_backward(dev, dy, rows, cols);
    const bf16* x = dy.wide;
    FormsOut out = forms_of_e5m2(dy);
    int fp8 = dy.data != NULL || dy.transposed != NULL;
    check_forms("quantize_backward", out, dy.slot, fp8, rows, cols);
    check(x != NULL, "quantize_backward: no BF16 form to read");
    if (!fp8 && dbias == NULL) { return; }
    out.wide = NULL; // an input here
    int strips = (int)element_grid(rows, cols, 1).y;
    float* partials = dbias == NULL ? NULL : workspace_floats(dev, "quantize_backward", (size_t)strips * cols);
    if (fp8 && dy.measure_first) {
        quantize_launch<e5m2>(dev, measure_begin(dev, out), NULL, x, rows, cols);
        measure_end(dev, out, dy.recipe);
    }
    quantize_launch<e5m2>(dev, out, partials, x, rows, cols);
    if (dbias != NULL) { column_sums_add(dev, ColumnSums{{dbias, NULL, NULL}}, 1, partials, strips, cols); }
}

void quantize_weight(Device* dev, E4m3Tensor w, const float* master, int OC, int C) {
    cost_quantize_weight(dev, w, OC, C);
    w.wide = NULL;
    w.record = 0; // a weight's slot is measured by the optimizer, never here
    FormsOut out = forms_of_e4m3(w);
    check_forms("quantize_weight", out, w.slot, 1, OC, C);
    check((uintptr_t)master % 16 == 0, "quantize_weight: master weights are not aligned to 16 bytes");
    if (out.slot == NULL) { return; }
    auto kernel = forms_are_both(out) ? quantize_weight_kernel<FORMS_BOTH> : quantize_weight_kernel<FORMS_FP8>;
    launch(dev, kernel, element_grid(OC, C, 0), ELEMENT_THREADS, 0, out, master, OC, C);
}

#endif
