// FP8 number formats in software: exact, branch-free, the same lines on the CPU floor, in gcc tests and on the GPU.
//
//   E4M3 (OCP / NVIDIA "E4M3FN")                      E5M2 (IEEE-like)
//   s eeee mmm, bias 7                                s eeeee mm, bias 15
//   max 448 = 0x7E, no infinity                       max 57344 = 0x7B, infinity 0x7C
//   smallest normal 2^-6, smallest subnormal 2^-9     smallest normal 2^-14, smallest subnormal 2^-16
//   NaN 0x7F, 0xFF only                               NaN 0x7D..0x7F
//   half an ulp is at most 2^-4 of the value          half an ulp is at most 2^-3 of the value
//
// Conversion to FP8 rounds to nearest, ties to even, and saturates: every finite or infinite value beyond the maximum
// becomes +-max; NaN becomes 0x7F whatever its sign. This is what __nv_cvt_float_to_fp8(x, __NV_SATFINITE, ...) and the
// hardware's cvt.rn.satfinite do, bit for bit (tested on all 256 codes and on millions of floats).
// Formats: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, section 3; OCP OFP8 specification 1.0.
// Also here: rounding to BF16, the storage format beside them.
#ifndef FP8_H
#define FP8_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

#define E4M3_MAX 448.0f
#define E5M2_MAX 57344.0f

HOST_DEVICE static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

HOST_DEVICE static inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// float -> FP8 code with `mantissa_bits` of mantissa, exponent bias `bias` and largest finite code `max_code`.
//   normal     add half an ulp (ties to even) in the integer representation, then move the exponent to the new bias
//   subnormal  |x| + magic, where one ulp of magic is the smallest subnormal: the FPU rounds for us
// Both are computed and selected, so that loops over this vectorise.
HOST_DEVICE static inline uint8_t fp8_encode(float x, int mantissa_bits, int bias, uint32_t max_code) {
    uint32_t bits = float_bits(x);
    uint32_t magnitude = bits & 0x7FFFFFFFu;
    uint32_t sign = (bits >> 24) & 0x80u;
    int shift = 23 - mantissa_bits;
    uint32_t rounded = magnitude + ((1u << (shift - 1)) - 1u) + ((magnitude >> shift) & 1u);
    uint32_t normal = (rounded >> shift) - ((uint32_t)(127 - bias) << mantissa_bits);
    uint32_t magic = (uint32_t)(127 + 1 - bias - mantissa_bits + 23) << 23;
    uint32_t subnormal = float_bits(bits_float(magnitude) + bits_float(magic)) - magic;
    uint32_t smallest_normal = (uint32_t)(127 + 1 - bias) << 23;
    uint32_t code = magnitude < smallest_normal ? subnormal : normal;
    // beyond the largest finite value everything saturates; compared before the shift, where nothing has wrapped
    uint32_t largest = (max_code + ((uint32_t)(127 - bias) << mantissa_bits)) << shift;
    code = magnitude > largest ? max_code : code;
    code |= sign;
    return (uint8_t)(magnitude > 0x7F800000u ? 0x7Fu : code);
}

// FP8 code -> float, exact. The code's exponent and mantissa are placed in a float whose exponent is then moved to
// FP32's bias by a multiplication: subnormal codes come out right because they are subnormal floats before it.
HOST_DEVICE static inline float fp8_decode_finite(uint8_t code, int mantissa_bits, int bias) {
    float magnitude = bits_float((uint32_t)(code & 0x7Fu) << (23 - mantissa_bits));
    float value = magnitude * bits_float((uint32_t)(127 + 127 - bias) << 23);
    return bits_float(float_bits(value) | (uint32_t)(code & 0x80u) << 24);
}

HOST_DEVICE static inline uint8_t e4m3_from_float(float x) { return fp8_encode(x, 3, 7, 0x7Eu); }
HOST_DEVICE static inline uint8_t e5m2_from_float(float x) { return fp8_encode(x, 2, 15, 0x7Bu); }

HOST_DEVICE static inline float float_from_e4m3(uint8_t code) {
    float value = fp8_decode_finite(code, 3, 7);
    return (code & 0x7Fu) == 0x7Fu ? bits_float(0x7FC00000u) : value;
}

HOST_DEVICE static inline float float_from_e5m2(uint8_t code) {
    float value = fp8_decode_finite(code, 2, 15);
    uint32_t special = (code & 3u) ? 0x7FC00000u : (0x7F800000u | (uint32_t)(code & 0x80u) << 24);
    return (code & 0x7Cu) == 0x7Cu ? bits_float(special) : value;
}

// Round to the nearest BF16 value (ties to even), as a float. Overflows to infinity as BF16 does; NaN stays NaN.
HOST_DEVICE static inline float bf16_round(float x) {
    uint32_t bits = float_bits(x);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
    return bits_float((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits | 0x00400000u : rounded);
}

// Round to one of the two BF16 neighbours of x, to the farther one with the probability that makes the mean x itself:
// 16 random bits are added to the 16 that are cut off (llm.c does the same to its BF16 weights). Inf and NaN stay.
HOST_DEVICE static inline float bf16_round_stochastic(float x, uint32_t random16) {
    uint32_t bits = float_bits(x);
    uint32_t rounded = (bits + (random16 & 0xFFFFu)) & 0xFFFF0000u;
    return (bits & 0x7F800000u) == 0x7F800000u ? bf16_round(x) : bits_float(rounded);
}

#endif
