// Random numbers that are the same on every machine, and where each kind is used.
//
// Philox4x32-10     counter-based: number i of stream s is a function of (seed, s, i) alone. No state to save, any
//                   thread may draw any number: sampling, everything on the GPU.
//                   Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11, section 3.3.
// MT19937           with PyTorch's conversions to float and its normal distribution: llm.c draws its initial weights
//                   and its data order from it, and so do we, so that a fresh model and its batches equal llm.c's.
//                   Matsumoto, Nishimura, "Mersenne Twister", ACM TOMACS 8(1), 1998.
#ifndef RNG_H
#define RNG_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Philox4x32-10

typedef struct {
    uint32_t word[4];
} Philox4;

// One round: two 32x32 -> 64 bit products, whose high halves are mixed with the other words and the key.
HOST_DEVICE static inline Philox4 philox_round(Philox4 c, uint32_t key0, uint32_t key1) {
    uint64_t product0 = (uint64_t)0xD2511F53u * c.word[0], product1 = (uint64_t)0xCD9E8D57u * c.word[2];
    Philox4 out = {{(uint32_t)(product1 >> 32) ^ c.word[1] ^ key0, (uint32_t)product1,
                    (uint32_t)(product0 >> 32) ^ c.word[3] ^ key1, (uint32_t)product0}};
    return out;
}

// The 128 random bits at `counter` under the 64-bit key (key0, key1): ten rounds, the key raised by the Weyl constants
// (golden ratio, sqrt(3) - 1) between them.
HOST_DEVICE static inline Philox4 philox_bits(Philox4 counter, uint32_t key0, uint32_t key1) {
    for (int round = 0; round < 10; round++) {
        counter = philox_round(counter, key0, key1);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// 128 random bits number `index` of `stream` under `seed`.
HOST_DEVICE static inline Philox4 philox(uint64_t seed, uint64_t stream, uint64_t index) {
    Philox4 counter = {{(uint32_t)index, (uint32_t)(index >> 32), (uint32_t)stream, (uint32_t)(stream >> 32)}};
    return philox_bits(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
}

// Uniform in [0, 1), a multiple of 2^-24, so exact in FP32.
HOST_DEVICE static inline float rng_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
    return (float)(philox(seed, stream, index).word[0] >> 8) * 0x1p-24f;
}

// Normal with mean 0 and deviation 1: Box-Muller in double, rounded once. The first uniform is in (0, 1], so the
// logarithm is finite and |x| <= 6.7.
HOST_DEVICE static inline float rng_normal(uint64_t seed, uint64_t stream, uint64_t index) {
    Philox4 bits = philox(seed, stream, index);
    double u1 = ((double)bits.word[0] + 1.0) * 0x1p-32, u2 = (double)bits.word[1] * 0x1p-32;
    return (float)(sqrt(-2.0 * log(u1)) * cos(6.283185307179586 * u2));
}

// ---------------------------------------------------------------------------------------------------------------------
// MT19937 as PyTorch and llm.c use it (host only)

#define MT_SIZE 624

typedef struct {
    uint32_t state[MT_SIZE];
    int next; // the next word of `state` to hand out; MT_SIZE: make new ones first
} Mt19937;

// torch.manual_seed(seed)
static inline void mt_seed(Mt19937* mt, uint32_t seed) {
    mt->state[0] = seed;
    for (uint32_t i = 1; i < MT_SIZE; i++) {
        uint32_t before = mt->state[i - 1];
        mt->state[i] = 1812433253u * (before ^ (before >> 30)) + i;
    }
    mt->next = MT_SIZE;
}

static inline uint32_t mt_twist(uint32_t high, uint32_t low, uint32_t far) {
    uint32_t joined = (high & 0x80000000u) | (low & 0x7FFFFFFFu);
    return far ^ (joined >> 1) ^ (0x9908B0DFu & -(joined & 1u));
}

// The next MT_SIZE words. Two loops without a modulo, which compilers vectorise: a large model draws 10^10 words.
static inline void mt_refill(Mt19937* mt) {
    uint32_t* s = mt->state;
    for (int i = 0; i < MT_SIZE - 397; i++) {
        s[i] = mt_twist(s[i], s[i + 1], s[i + 397]);
    }
    for (int i = MT_SIZE - 397; i < MT_SIZE - 1; i++) {
        s[i] = mt_twist(s[i], s[i + 1], s[i + 397 - MT_SIZE]);
    }
    s[MT_SIZE - 1] = mt_twist(s[MT_SIZE - 1], s[0], s[396]);
    mt->next = 0;
}

static inline uint32_t mt_temper(uint32_t y) {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9D2C5680u;
    y ^= (y << 15) & 0xEFC60000u;
    return y ^ (y >> 18);
}

// 32 random bits.
static inline uint32_t mt_next(Mt19937* mt) {
    if (mt->next >= MT_SIZE) { mt_refill(mt); }
    return mt_temper(mt->state[mt->next++]);
}

// Uniform in [0, 1): the low 24 bits of one draw.
static inline float mt_uniform_of(uint32_t bits) { return (float)(int)(bits & 0xFFFFFFu) * 0x1p-24f; }
static inline float mt_uniform(Mt19937* mt) { return mt_uniform_of(mt_next(mt)); }

// x (n): n draws of mt_uniform.
static inline void mt_uniforms(Mt19937* mt, float* x, size_t n) {
    for (size_t done = 0; done < n;) {
        if (mt->next >= MT_SIZE) { mt_refill(mt); }
        size_t held = (size_t)(MT_SIZE - mt->next), count = n - done < held ? n - done : held;
        const uint32_t* words = mt->state + mt->next;
        for (size_t i = 0; i < count; i++) {
            x[done + i] = mt_uniform_of(mt_temper(words[i]));
        }
        mt->next += (int)count;
        done += count;
    }
}

// Uniform in [0, 1): the low 53 bits of two draws, the first one high.
static inline double mt_uniform_double(Mt19937* mt) {
    uint64_t high = mt_next(mt), low = mt_next(mt);
    return (double)(((high << 32) | low) & 0x1FFFFFFFFFFFFFull) * 0x1p-53;
}

// Sixteen uniforms at x become sixteen normals: x[t] and x[t + 8] are one Box-Muller pair, in FP32 as PyTorch does it.
static inline void mt_box_muller_16(float* x, float mean, float deviation) {
    for (int t = 0; t < 8; t++) {
        float radius = sqrtf(-2.0f * logf(1.0f - x[t] + 1e-12f));
        float angle = (float)(6.283185307179586 * (double)x[t + 8]);
        x[t] = radius * cosf(angle) * deviation + mean;
        x[t + 8] = radius * sinf(angle) * deviation + mean;
    }
}

// x (n) = normal(mean, deviation), the values of torch's Tensor.normal_ on a CPU and of llm.c, in this order of draws:
//   n >= 16  n uniforms, then Box-Muller on each full group of 16; a ragged end draws its last 16 values anew
//   n < 16   pairs from double-precision uniforms
static inline void mt_normal(Mt19937* mt, float* x, size_t n, float mean, float deviation) {
    if (n < 16) {
        float spare = 0.0f; // second value of a pair
        for (size_t i = 0; i < n; i++) {
            if (i % 2 == 1) {
                x[i] = spare * deviation + mean;
                continue;
            }
            float u1 = (float)mt_uniform_double(mt), u2 = (float)mt_uniform_double(mt);
            float radius = sqrtf(-2.0f * logf(1.0f - u2 + 1e-12f));
            float angle = (float)(6.283185307179586 * (double)u1);
            spare = radius * sinf(angle);
            x[i] = radius * cosf(angle) * deviation + mean;
        }
        return;
    }
    mt_uniforms(mt, x, n); // the draws are one chain, the groups of 16 below are not
    long long num_groups = (long long)(n / 16);
#ifdef _OPENMP
#pragma omp parallel for schedule(static)
#endif
    for (long long group = 0; group < num_groups; group++) {
        mt_box_muller_16(x + 16 * group, mean, deviation);
    }
    if (n % 16 != 0) {
        mt_uniforms(mt, x + n - 16, 16);
        mt_box_muller_16(x + n - 16, mean, deviation);
    }
}

// Shuffle x (n) in place: Fisher-Yates from the end, index = draw modulo (i + 1), as llm.c does it.
static inline void mt_shuffle(Mt19937* mt, int* x, int n) {
    for (int i = n - 1; i > 0; i--) {
        int j = (int)(mt_next(mt) % (uint32_t)(i + 1));
        int moved = x[i];
        x[i] = x[j];
        x[j] = moved;
    }
}

#endif
