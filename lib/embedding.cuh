// Tokens -> residual stream, and the gradients of the token and position tables.
#ifndef EMBEDDING_CUH
#define EMBEDDING_CUH

#include "gpu.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// out (B*T, C) = wte[token] + wpe[t], BF16, one rounding.   grid-free: thread i has 8 columns of one token
//   bytes    2 written + 2 read of wte (wpe stays in L2): 201 MB at B,T,C = 64,1024,768, 47 us at 4.3 TB/s
//   threads  256; C a multiple of 8; tokens in [0, V) are the loader's promise
__global__ void __launch_bounds__(256) embedding_forward_kernel(bf16* out, const int* tokens, const bf16* wte,
                                                                const bf16* wpe, size_t num_vectors, int T, int C) {
    kernel_begin();
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= num_vectors) { return; }
    int vectors_per_row = C / BF16_OF_VECTOR;
    size_t row = i / vectors_per_row;
    int c = (int)(i - row * vectors_per_row) * BF16_OF_VECTOR;
    int token = tokens[row], t = (int)(row % T);
    float v[8], position[8];
    unpack8(v, load_vector(wte + (size_t)token * C + c));
    unpack8(position, load_vector(wpe + (size_t)t * C + c));
#pragma unroll
    for (int j = 0; j < 8; j++) {
        v[j] += position[j];
    }
    store_vector(out + i * BF16_OF_VECTOR, pack8(v));
}

// dwpe (T, C) FP32 += sum over b, first to last, of dout (B, T, C) BF16.   thread i has 8 columns of one position
//   bytes    2 read per element of dout: 101 MB at 64,1024,768, 23 us at 4.3 TB/s
__global__ void __launch_bounds__(128)
    embedding_backward_position_kernel(float* dwpe, const bf16* dout, int B, size_t num_vectors) {
    kernel_begin();
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i >= num_vectors) { return; }
    float sum[8] = {};
#pragma unroll 8
    for (int b = 0; b < B; b++) {
        float v[8];
        unpack8(v, load_vector(dout + (b * num_vectors + i) * BF16_OF_VECTOR));
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum[j] += v[j];
        }
    }
    float4* to = (float4*)(dwpe + i * BF16_OF_VECTOR);
    float4 left = to[0], right = to[1];
    to[0] = make_float4(left.x + sum[0], left.y + sum[1], left.z + sum[2], left.w + sum[3]);
    to[1] = make_float4(right.x + sum[4], right.y + sum[5], right.z + sum[6], right.w + sum[7]);
}

// The sorted rows of the index are cut into segments of equal length, whatever tokens they hold, so that a token with
// tens of thousands of rows is shared by many blocks. A bucket that lies inside one segment is added to dwte at once; a
// bucket that crosses segments leaves one partial sum in each of them: `head` where it came in from the segment before,
// `tail` where it starts. A second kernel adds those up in order.
typedef struct {
    float* head; // (num_segments, C)
    float* tail; // (num_segments, C)
    int length;  // rows per segment, the last may be shorter
} EmbeddingSegments;

#define EMBEDDING_SEGMENTS 384 // at most; 2 x 384 rows of partial sums fit reduction_workspace_bytes
#define EMBEDDING_COLS 4       // columns per thread
#define EMBEDDING_BATCH 8      // rows whose loads are in flight together

// The bucket that holds position p of index.rows.
__device__ static inline int embedding_bucket_at(TokenIndex index, int p) {
    int low = 0, high = index.num_buckets - 1;
    while (low < high) { // last bucket that starts at or before p
        int middle = (low + high + 1) / 2;
        if (index.bucket_start[middle] <= p) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

__device__ static inline void embedding_add4(float* to, float4 sum) {
    float4 old = *(float4*)to;
    *(float4*)to = make_float4(old.x + sum.x, old.y + sum.y, old.z + sum.z, old.w + sum.w);
}

// dwte (Vp, C) FP32 += rows of dout (BT, C) BF16 of the buckets inside this segment; head, tail = of those that cross
//   bytes    2 read per element of dout + 8 per element of a touched row of dwte: 200 MB at 64,1024,768 with 16k
//   distinct
//            tokens, 46 us at 4.3 TB/s
//   threads  grid (C / 4 / 64, segments), block 64
//   bits     deterministic: rows ascending inside a bucket, pieces of a bucket in order
__global__ void __launch_bounds__(64) embedding_backward_kernel(float* dwte, EmbeddingSegments segments,
                                                                const bf16* dout, TokenIndex index, int BT, int C) {
    kernel_begin();
    int c = (blockIdx.x * 64 + threadIdx.x) * EMBEDDING_COLS;
    if (c >= C) { return; }
    int begin = blockIdx.y * segments.length, end = min(BT, begin + segments.length);
    int bucket = embedding_bucket_at(index, begin);
    int bucket_start = index.bucket_start[bucket], bucket_end = index.bucket_start[bucket + 1];
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int p = begin; p < end; p += EMBEDDING_BATCH) {
        uint2 raw[EMBEDDING_BATCH] = {};
#pragma unroll
        for (int k = 0; k < EMBEDDING_BATCH; k++) {
            if (p + k < end) { raw[k] = *(const uint2*)(dout + (size_t)index.rows[p + k] * C + c); }
        }
#pragma unroll
        for (int k = 0; k < EMBEDDING_BATCH; k++) {
            if (p + k >= end) { break; }
            sum.x += __uint_as_float(raw[k].x << 16);
            sum.y += __uint_as_float(raw[k].x & 0xFFFF0000u);
            sum.z += __uint_as_float(raw[k].y << 16);
            sum.w += __uint_as_float(raw[k].y & 0xFFFF0000u);
            if (p + k + 1 == bucket_end || p + k + 1 == end) { // this bucket's piece is complete
                if (bucket_start < begin) {
                    *(float4*)(segments.head + (size_t)blockIdx.y * C + c) = sum;
                } else if (bucket_end > end) {
                    *(float4*)(segments.tail + (size_t)blockIdx.y * C + c) = sum;
                } else {
                    embedding_add4(dwte + (size_t)index.bucket_token[bucket] * C + c, sum);
                }
                sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (p + k + 1 < end) {
                    bucket++;
                    bucket_start = bucket_end;
                    bucket_end = index.bucket_start[bucket + 1];
                }
            }
        }
    }
}

// dwte += the pieces of the bucket that ends in this segment after it came in from an earlier one, first to last
//   threads  grid (C / 4 / 64, segments), block 64
__global__ void __launch_bounds__(64)
    embedding_backward_join_kernel(float* dwte, EmbeddingSegments segments, TokenIndex index, int BT, int C) {
    kernel_begin();
    int c = (blockIdx.x * 64 + threadIdx.x) * EMBEDDING_COLS, segment = blockIdx.y;
    if (c >= C) { return; }
    int begin = segment * segments.length, end = min(BT, begin + segments.length);
    int bucket = embedding_bucket_at(index, begin);
    int start = index.bucket_start[bucket];
    if (start >= begin || index.bucket_start[bucket + 1] > end) { return; } // not crossing, or another joins it
    int first = start / segments.length;
    float4 sum = *(const float4*)(segments.tail + (size_t)first * C + c);
#pragma unroll 8
    for (int s = first + 1; s <= segment; s++) {
        float4 piece = *(const float4*)(segments.head + (size_t)s * C + c);
        sum = make_float4(sum.x + piece.x, sum.y + piece.y, sum.z + piece.z, sum.w + piece.w);
    }
    embedding_add4(dwte + (size_t)index.bucket_token[bucket] * C + c, sum);
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

void embedding_forward(Device* dev, bf16* out, const int* tokens, const bf16* wte, const bf16* wpe, int B, int T,
                       int C) {
    cost_embedding_forward(dev, B, T, C);
    check(B > 0 && T > 0 && C > 0 && C % BF16_OF_VECTOR == 0,
          "embedding_forward: (B, T, C) = (%d, %d, %d), want all positive and C a multiple of %d", B, T, C,
          BF16_OF_VECTOR);
    size_t num_vectors = (size_t)B * T * C / BF16_OF_VECTOR;
    launch(dev, embedding_forward_kernel, (unsigned)ceil_div(num_vectors, 256), 256, 0, out, tokens, wte, wpe,
           num_vectors, T, C);
}

void embedding_backward(Device* dev, float* dwte, float* dwpe, const bf16* dout, TokenIndex index, int B, int T,
                        int C) {
    cost_embedding_backward(dev, index.num_buckets, B, T, C);
    check(B > 0 && T > 0 && C > 0 && C % BF16_OF_VECTOR == 0,
          "embedding_backward: (B, T, C) = (%d, %d, %d), want all positive and C a multiple of %d", B, T, C,
          BF16_OF_VECTOR);
    check(index.num_buckets > 0, "embedding_backward: empty token index");
    size_t num_vectors = (size_t)T * C / BF16_OF_VECTOR;
    launch(dev, embedding_backward_position_kernel, (unsigned)ceil_div(num_vectors, 128), 128, 0, dwpe, dout, B,
           num_vectors);

    int BT = B * T;
    int length = (int)ceil_div((size_t)BT, EMBEDDING_SEGMENTS);
    if (length < 16) { length = 16; } // shorter ones would mostly cross
    int num_segments = (int)ceil_div((size_t)BT, (size_t)length);
    float* head = workspace_floats(dev, "embedding_backward", 2 * (size_t)num_segments * C);
    EmbeddingSegments segments = {head, head + (size_t)num_segments * C, length};
    dim3 grid((unsigned)ceil_div((size_t)C, 64 * EMBEDDING_COLS), (unsigned)num_segments);
    launch(dev, embedding_backward_kernel, grid, 64, 0, dwte, segments, dout, index, BT, C);
    launch(dev, embedding_backward_join_kernel, grid, 64, 0, dwte, segments, index, BT, C);
}

#endif
