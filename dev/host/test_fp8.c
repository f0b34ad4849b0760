// The FP8 codec and BF16 rounding of lib/fp8.h against two judges:
//   an independent one in FP64, written from the format tables alone (nearest value, ties to the even code), and
//   the CUDA header's host conversions, where cuda_fp8.h can be included (-isystem <cuda>/include).
// Decoding is checked on all 256 codes, encoding on every 1021st of all floats, on random bits, and on the floats
// around every value and every tie of a format.
#include "unit.h"

#include <math.h>
#include <stdint.h>

#include "../../lib/fp8.h"

#ifdef __has_include
#if __has_include(<cuda_fp8.h>)
#define HAVE_CUDA_FP8
#include <cuda_fp8.h>
#endif
#endif

typedef struct {
    const char* name;
    int mantissa_bits, bias;
    int largest;       // code of the largest finite value
    int infinity;      // code, or -1
    double value[128]; // of codes 0..largest, by the definition of the format
    uint8_t (*encode)(float);
    float (*decode)(uint8_t);
} Format;

// A function of the type that the table wants, whatever HOST_DEVICE does to the originals.
static uint8_t encode_e4m3(float x) {
    return e4m3_from_float(x);
}
static uint8_t encode_e5m2(float x) {
    return e5m2_from_float(x);
}
static float decode_e4m3(uint8_t code) {
    return float_from_e4m3(code);
}
static float decode_e5m2(uint8_t code) {
    return float_from_e5m2(code);
}

static Format format_of(int e5m2) {
    Format e4m3_format = {"E4M3", 3, 7, 0x7E, -1, {0}, encode_e4m3, decode_e4m3};
    Format e5m2_format = {"E5M2", 2, 15, 0x7B, 0x7C, {0}, encode_e5m2, decode_e5m2};
    Format f = e5m2 ? e5m2_format : e4m3_format;
    for (int code = 0; code <= f.largest; code++) {
        int exponent = code >> f.mantissa_bits, mantissa = code & ((1 << f.mantissa_bits) - 1);
        double fraction = (double)mantissa / (1 << f.mantissa_bits);
        f.value[code] = exponent == 0 ? ldexp(fraction, 1 - f.bias) : ldexp(1.0 + fraction, exponent - f.bias);
    }
    return f;
}

// The code that `x` must become: nearest value, ties to the even code, saturating, NaN 0x7F.
static uint8_t judged_code(const Format* f, float x) {
    if (isnan(x)) { return 0x7F; }
    uint8_t sign = signbit(x) ? 0x80 : 0;
    double magnitude = fabs((double)x);
    if (magnitude >= f->value[f->largest]) { return (uint8_t)(sign | f->largest); }
    int below = 0, above = f->largest; // value[below] <= magnitude < value[above]
    while (above - below > 1) {
        int middle = (below + above) / 2;
        if (f->value[middle] <= magnitude) {
            below = middle;
        } else {
            above = middle;
        }
    }
    double to_below = magnitude - f->value[below], to_above = f->value[above] - magnitude; // exact in FP64
    int up = to_above < to_below || (to_above == to_below && below % 2 == 1);
    return (uint8_t)(sign | (up ? above : below));
}

static uint64_t lcg_state = 20261121;
static uint32_t random_bits(void) { // Knuth's MMIX generator, high half
    lcg_state = lcg_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(lcg_state >> 32);
}

static void judge(const Format* f, uint32_t bits) {
    float x = bits_float(bits);
    uint8_t code = f->encode(x), want = judged_code(f, x);
    expect(code == want, "%s from %a (bits %08x) = %02x, want %02x", f->name, (double)x, bits, code, want);
#ifdef HAVE_CUDA_FP8
    uint8_t cuda = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, f->mantissa_bits == 3 ? __NV_E4M3 : __NV_E5M2);
    expect(code == cuda, "%s from %a (bits %08x) = %02x, the CUDA header says %02x", f->name, (double)x, bits, code,
           cuda);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------

static void test_decode_all_codes(void) {
    for (int e5m2 = 0; e5m2 < 2; e5m2++) {
        Format f = format_of(e5m2);
        for (int code = 0; code < 256; code++) {
            float x = f.decode((uint8_t)code);
            int magnitude = code & 0x7F;
            expect(!!signbit(x) == (code >> 7) || isnan(x), "%s %02x: sign of %g", f.name, code, (double)x);
            if (magnitude <= f.largest) {
                expect(fabs((double)x) == f.value[magnitude], "%s %02x = %a, want %a", f.name, code, (double)x,
                       f.value[magnitude]);
            } else if (magnitude == f.infinity) {
                expect(isinf(x), "%s %02x = %g, want infinity", f.name, code, (double)x);
            } else {
                expect(isnan(x), "%s %02x = %g, want NaN", f.name, code, (double)x);
            }
        }
    }
}

// The constants of the format tables, as numbers a reader knows.
static void test_known_values(void) {
    expect(float_from_e4m3(0x7E) == 448.0f && float_from_e4m3(0x01) == 0x1p-9f, "E4M3 largest and smallest");
    expect(float_from_e4m3(0x08) == 0x1p-6f, "E4M3 smallest normal");
    expect(float_from_e5m2(0x7B) == 57344.0f && float_from_e5m2(0x01) == 0x1p-16f, "E5M2 largest and smallest");
    expect(float_from_e5m2(0x04) == 0x1p-14f, "E5M2 smallest normal");
    expect(e4m3_from_float(1.0f) == 0x38 && e5m2_from_float(-1.0f) == 0xBC, "codes of 1 and -1");
    expect(E4M3_MAX == 448.0f && E5M2_MAX == 57344.0f, "maxima");
    expect(e4m3_from_float(1e30f) == 0x7E && e4m3_from_float(-INFINITY) == 0xFE, "E4M3 saturates");
    expect(e5m2_from_float(1e30f) == 0x7B && e5m2_from_float(-INFINITY) == 0xFB, "E5M2 saturates");
    expect(e4m3_from_float(bits_float(0xFFC00000u)) == 0x7F, "NaN loses its sign");
    expect(e4m3_from_float(-0.0f) == 0x80 && e5m2_from_float(-1e-30f) == 0x80, "zero keeps its sign");
    expect(e4m3_from_float(1.0625f) == 0x38 && e4m3_from_float(1.1875f) == 0x3A, "ties go to the even code");
}

static void test_encode_round_trip(void) {
    for (int e5m2 = 0; e5m2 < 2; e5m2++) {
        Format f = format_of(e5m2);
        for (int code = 0; code < 256; code++) {
            float x = f.decode((uint8_t)code);
            int want = isnan(x) ? 0x7F : isinf(x) ? (code & 0x80) | f.largest : code;
            expect(f.encode(x) == want, "%s %02x -> %g -> %02x, want %02x", f.name, code, (double)x, f.encode(x), want);
        }
    }
}

// The floats next to every value of a format and every middle between two, 64 on either side, both signs; beyond the
// largest value up to where nearest rounding without saturation would have become NaN or infinity; NaNs.
static void test_encode_ties_and_edges(void) {
    for (int e5m2 = 0; e5m2 < 2; e5m2++) {
        Format f = format_of(e5m2);
        for (int code = 0; code <= f.largest; code++) {
            double next = code < f.largest ? f.value[code + 1] : 2.0 * f.value[f.largest];
            float centres[3] = {(float)f.value[code], (float)(0.5 * (f.value[code] + next)), (float)next};
            for (int c = 0; c < 3; c++) {
                for (int step = -64; step <= 64; step++) {
                    uint32_t bits = float_bits(centres[c]);
                    if (step < 0 && bits < 64) { continue; }
                    judge(&f, bits + (uint32_t)step);
                    judge(&f, (bits + (uint32_t)step) | 0x80000000u);
                }
            }
        }
        uint32_t specials[] = {0x00000001u, 0x007FFFFFu, 0x00800000u, 0x7F7FFFFFu,
                               0x7F800000u, 0x7F800001u, 0x7FC00000u, 0x7FFFFFFFu};
        for (int i = 0; i < 8; i++) {
            judge(&f, specials[i]);
            judge(&f, specials[i] | 0x80000000u);
        }
    }
}

static void test_encode_sweep_of_all_floats(void) {
    for (int e5m2 = 0; e5m2 < 2; e5m2++) {
        Format f = format_of(e5m2);
        for (uint64_t bits = (uint64_t)e5m2; bits <= 0xFFFFFFFFull; bits += 1021) {
            judge(&f, (uint32_t)bits);
        }
    }
}

static void test_encode_random_floats(void) {
    for (int e5m2 = 0; e5m2 < 2; e5m2++) {
        Format f = format_of(e5m2);
        for (int i = 0; i < 1000000; i++) {
            uint32_t bits = random_bits();
            judge(&f, bits);
            // the same mantissa at an exponent that is in the format's range: 2^-20 .. 2^20
            judge(&f, (bits & 0x807FFFFFu) | ((107u + random_bits() % 41u) << 23));
        }
    }
}

// Rounding to BF16, judged in FP64: the result is a BF16 value, none is nearer, and a tie has an even last bit.
static void judge_bf16(uint32_t bits) {
    float x = bits_float(bits), y = bf16_round(x);
    if (isnan(x)) {
        expect(isnan(y), "bf16_round(NaN %08x) = %g", bits, (double)y);
        return;
    }
    expect((float_bits(y) & 0xFFFFu) == 0, "bf16_round(%a) = %a is no BF16 value", (double)x, (double)y);
    uint32_t below = bits & 0xFFFF0000u, above = below + 0x10000u;
    double at = (double)bits_float(bits & 0x7FFFFFFFu), low = (double)bits_float(below & 0x7FFFFFFFu);
    double high = (above & 0x7FFFFFFFu) == 0x7F800000u ? 0x1p128 : (double)bits_float(above & 0x7FFFFFFFu);
    int up = isinf(x) ? 0 : high - at < at - low || (high - at == at - low && ((below >> 16) & 1u));
    expect(float_bits(y) == (up ? above : below), "bf16_round(%a) = %a, want %a", (double)x, (double)y,
           (double)bits_float(up ? above : below));
}

static void test_bf16_round(void) {
    for (uint64_t bits = 0; bits <= 0xFFFFFFFFull; bits += 509) {
        judge_bf16((uint32_t)bits);
    }
    for (uint32_t high = 0; high < 0x10000u; high++) { // every tie and its neighbours
        judge_bf16(high << 16);
        judge_bf16((high << 16) | 0x7FFFu);
        judge_bf16((high << 16) | 0x8000u);
        judge_bf16((high << 16) | 0x8001u);
    }
}

// Stochastic rounding: one of the two neighbours, up exactly as often as the bits that are cut off say, BF16 values and
// what is no number stay.
static void test_bf16_round_stochastic(void) {
    for (int i = 0; i < 40; i++) {
        uint32_t bits = random_bits(), cut = bits & 0xFFFFu;
        float x = bits_float(bits);
        uint32_t below = bits & 0xFFFF0000u, num_up = 0;
        if ((bits & 0x7F800000u) == 0x7F800000u) { continue; }
        for (uint32_t random = 0; random < 0x10000u; random++) {
            uint32_t got = float_bits(bf16_round_stochastic(x, random | (random_bits() & 0xFFFF0000u)));
            expect(got == below || got == below + 0x10000u, "%a became %a", (double)x, (double)bits_float(got));
            num_up += got != below;
        }
        expect(num_up == cut, "%a (cut off: %04x) went up %u times of 65536", (double)x, cut, num_up);
    }
    for (uint32_t random = 0; random < 0x10000u; random += 257) {
        expect(bf16_round_stochastic(1.5f, random) == 1.5f && bf16_round_stochastic(-0.0f, random) == 0.0f,
               "BF16 stays");
        expect(isinf(bf16_round_stochastic(-INFINITY, random)), "infinity stays");
        expect(isnan(bf16_round_stochastic(bits_float(0x7F800001u), random)), "NaN stays");
    }
}

// The claim in the head comment of fp8.h: half an ulp is at most 2^-4 (E4M3) or 2^-3 (E5M2) of a normal value.
static void test_rounding_error_bound(void) {
    for (int i = 0; i < 1000000; i++) {
        float x = ldexpf(1.0f + (float)(random_bits() >> 9) * 0x1p-23f, (int)(random_bits() % 14u) - 6);
        float e4m3 = float_from_e4m3(e4m3_from_float(x)), e5m2 = float_from_e5m2(e5m2_from_float(x));
        if (x <= E4M3_MAX) { expect(fabsf(e4m3 - x) <= 0x1p-4f * x, "E4M3(%a) = %a", (double)x, (double)e4m3); }
        expect(fabsf(e5m2 - x) <= 0x1p-3f * x, "E5M2(%a) = %a", (double)x, (double)e5m2);
    }
}

static void test_cuda_header_decode(void) {
#ifdef HAVE_CUDA_FP8
    for (int code = 0; code < 256; code++) { // half holds every value of both formats
        for (int e5m2 = 0; e5m2 < 2; e5m2++) {
            Format f = format_of(e5m2);
            uint32_t half = __nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)code, e5m2 ? __NV_E5M2 : __NV_E4M3).x;
            int exponent = (int)(half >> 10 & 31u);
            double fraction = (double)(half & 1023u) / 1024.0;
            double want = exponent == 0 ? ldexp(fraction, -14) : ldexp(1.0 + fraction, exponent - 15);
            float x = f.decode((uint8_t)code);
            if (exponent == 31) {
                expect(fraction > 0.0 ? isnan(x) : isinf(x), "%s %02x = %g, the CUDA header says half %04x", f.name,
                       code, (double)x, half);
            } else {
                expect((double)fabsf(x) == want, "%s %02x = %a, the CUDA header says %a", f.name, code, (double)x,
                       want);
            }
        }
    }
#else
    unit_skip("cuda_fp8.h is not on the include path: encoding was checked against the FP64 judge only");
#endif
}

int main(void) {
    unit_run(test_decode_all_codes);
    unit_run(test_known_values);
    unit_run(test_encode_round_trip);
    unit_run(test_encode_ties_and_edges);
    unit_run(test_encode_sweep_of_all_floats);
    unit_run(test_encode_random_floats);
    unit_run(test_bf16_round);
    unit_run(test_bf16_round_stochastic);
    unit_run(test_rounding_error_bound);
    unit_run(test_cuda_header_decode);
    return unit_report();
}
