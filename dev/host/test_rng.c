// Random numbers against the published vectors of their papers and PyTorch's own output.
#include "rng.h"

#include "unit.h"

// Known-answer vectors of Random123 (kat_vectors, philox4x32 10).
static void test_philox_known_answers(void) {
    static const struct {
        Philox4 counter;
        uint32_t key[2];
        Philox4 want;
    } cases[] = {
        {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
        {{{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}},
         {0xffffffff, 0xffffffff},
         {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
        {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
         {0xa4093822, 0x299f31d0},
         {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
    };
    for (int i = 0; i < 3; i++) {
        Philox4 got = philox_bits(cases[i].counter, cases[i].key[0], cases[i].key[1]);
        for (int w = 0; w < 4; w++) {
            expect(got.word[w] == cases[i].want.word[w], "case %d word %d = %08x, want %08x", i, w, got.word[w],
                   cases[i].want.word[w]);
        }
    }
}

static void test_philox_streams_differ(void) {
    expect(rng_uniform(1, 0, 0) != rng_uniform(2, 0, 0), "seed has no effect");
    expect(rng_uniform(1, 0, 0) != rng_uniform(1, 1, 0), "stream has no effect");
    expect(rng_uniform(1, 0, 0) != rng_uniform(1, 0, 1), "index has no effect");
    expect(rng_uniform(1, 0, 0) != rng_uniform(1, 0, 1ull << 32), "the high half of index has no effect");
    expect(rng_uniform(1, 0, 0) != rng_uniform(1, 1ull << 32, 0), "the high half of stream has no effect");
    expect(rng_uniform(1, 0, 0) != rng_uniform(1ull << 32 | 1, 0, 0), "the high half of seed has no effect");
}

// Mean, variance and fourth moment of n normals deviate by 1, sqrt(2), sqrt(96) over sqrt(n); 5 of those sigmas.
static void check_normal_moments(const char* name, const double sum[4], double n) {
    double mean = sum[0] / n, variance = sum[1] / n, fourth = sum[3] / n;
    expect(fabs(mean) < 5 / sqrt(n), "%s: mean %g", name, mean);
    expect(fabs(variance - 1) < 5 * sqrt(2 / n), "%s: variance %g", name, variance);
    expect(fabs(sum[2] / n) < 5 * sqrt(15 / n), "%s: third moment %g", name, sum[2] / n);
    expect(fabs(fourth - 3) < 5 * sqrt(96 / n), "%s: fourth moment %g", name, fourth);
}

static void add_moments(double sum[4], double x) {
    for (int k = 0, d = 1; k < 4; k++, d++) {
        sum[k] += pow(x, d);
    }
}

static void test_distributions(void) {
    const int n = 200000;
    double uniform_sum = 0, sum[4] = {0};
    int buckets[16] = {0};
    for (int i = 0; i < n; i++) {
        float u = rng_uniform(7, 3, (uint64_t)i);
        expect(u >= 0.0f && u < 1.0f, "uniform %g outside [0, 1)", (double)u);
        uniform_sum += (double)u;
        buckets[(int)(u * 16)]++;
        add_moments(sum, (double)rng_normal(7, 4, (uint64_t)i));
    }
    expect(fabs(uniform_sum / n - 0.5) < 5 * sqrt(1.0 / 12 / n), "uniform mean %g", uniform_sum / n);
    double chi2 = 0;
    for (int b = 0; b < 16; b++) {
        chi2 += (buckets[b] - n / 16.0) * (buckets[b] - n / 16.0) / (n / 16.0);
    }
    expect(chi2 < 50, "uniform: chi-square %g over 15 degrees of freedom", chi2); // p = 1e-5
    check_normal_moments("rng_normal", sum, n);

    Mt19937 mt;
    mt_seed(&mt, 1);
    float* x = (float*)malloc((size_t)n * sizeof(float));
    mt_normal(&mt, x, (size_t)n, 0.0f, 1.0f);
    double mt_sum[4] = {0};
    for (int i = 0; i < n; i++) {
        add_moments(mt_sum, (double)x[i]);
    }
    check_normal_moments("mt_normal", mt_sum, n);
    free(x);
}

// The 10,000th draw under the seed 5489 is fixed by the C++ standard (std::mt19937).
static void test_mt_known_answer(void) {
    Mt19937 mt;
    mt_seed(&mt, 5489);
    uint32_t value = 0;
    for (int i = 0; i < 10000; i++) {
        value = mt_next(&mt);
    }
    expect(value == 4123659995u, "draw 10000 = %u, want 4123659995", value);
}

// What PyTorch prints for manual_seed(137): five randint, normal_ of 8, one randint, normal_ of 16, one randint.
static void test_mt_matches_torch(void) {
    Mt19937 mt;
    mt_seed(&mt, 137);
    const uint32_t draws[] = {4053805790u, 2173880614u, 380293709u, 1237255315u, 2986595568u};
    for (int i = 0; i < 5; i++) {
        uint32_t got = mt_next(&mt);
        expect(got == draws[i], "draw %d = %u, want %u", i, got, draws[i]);
    }
    const double eight[] = {0.7947664260864258,  1.4369317293167114,  -0.2292192131280899, 0.47556325793266296,
                            -0.6334410905838013, -0.5791953802108765, -0.0925704762339592, -0.8659197092056274};
    const double sixteen[] = {-1.2813878059387207, -2.646395683288574, -0.06569503247737885, 0.2180829495191574,
                              -0.46536165475845337, -0.33108410239219666, 2.5485482215881348, 0.10425379872322083,
                              0.8460659980773926, 0.9462448358535767, -0.2913765013217926, 0.34313806891441345,
                              -1.1186704635620117, -0.18305328488349915, -2.3153159618377686, 0.3961987793445587};
    float x[16];
    mt_normal(&mt, x, 8, 0.0f, 1.0f);
    // torch's vector functions round the angle (up to 2 pi, half an ulp is 2.4e-7) otherwise than the C library's,
    // which moves a value by up to that times the radius, here below 5.9 = sqrt(2 ln 2^25)
    const double tolerance = 5.9 * 2.4e-7;
    for (int i = 0; i < 8; i++) {
        expect(fabs((double)x[i] - eight[i]) <= tolerance, "normal8[%d] = %.9g, want %.9g", i,
               (double)x[i], eight[i]);
    }
    uint32_t after = mt_next(&mt);
    expect(after == 2186503452u, "draw after 8 normals = %u", after);
    mt_normal(&mt, x, 16, 0.0f, 1.0f);
    for (int i = 0; i < 16; i++) {
        expect(fabs((double)x[i] - sixteen[i]) <= tolerance, "normal16[%d] = %.9g, want %.9g", i,
               (double)x[i], sixteen[i]);
    }
    after = mt_next(&mt);
    expect(after == 2756748748u, "draw after 16 normals = %u", after);
}

// A ragged length: full groups as in the shorter tensor, the last 16 values drawn anew from what follows.
static void test_mt_normal_ragged(void) {
    Mt19937 a, b;
    float x[37], y[48], last[16];
    mt_seed(&a, 3);
    mt_normal(&a, x, 37, 1.0f, 2.0f);
    mt_seed(&b, 3);
    for (int i = 0; i < 37; i++) {
        y[i] = mt_uniform(&b);
    }
    mt_box_muller_16(y, 1.0f, 2.0f);
    mt_box_muller_16(y + 16, 1.0f, 2.0f);
    for (int i = 0; i < 16; i++) {
        last[i] = mt_uniform(&b);
    }
    mt_box_muller_16(last, 1.0f, 2.0f);
    for (int i = 0; i < 37; i++) {
        float want = i < 21 ? y[i] : last[i - 21];
        expect(x[i] == want, "value %d = %g, want %g", i, (double)x[i], (double)want);
    }
    expect(mt_next(&a) == mt_next(&b), "both must have drawn 37 + 16 numbers");
}

static void test_mt_shuffle(void) {
    Mt19937 mt;
    mt_seed(&mt, 42);
    int x[1000], seen[1000] = {0}, in_place = 0;
    for (int i = 0; i < 1000; i++) {
        x[i] = i;
    }
    mt_shuffle(&mt, x, 1000);
    for (int i = 0; i < 1000; i++) {
        seen[x[i]]++;
        in_place += x[i] == i;
    }
    for (int i = 0; i < 1000; i++) {
        expect(seen[i] == 1, "%d occurs %d times", i, seen[i]);
    }
    expect(in_place < 10, "%d of 1000 stayed in place, about 1 expected", in_place);
    // the definition, by hand, for three elements
    Mt19937 by_hand;
    mt_seed(&by_hand, 9);
    int j2 = (int)(mt_next(&by_hand) % 3), j1 = (int)(mt_next(&by_hand) % 2), want[3] = {0, 1, 2}, got[3] = {0, 1, 2};
    int t = want[2]; want[2] = want[j2]; want[j2] = t;
    t = want[1]; want[1] = want[j1]; want[j1] = t;
    mt_seed(&mt, 9);
    mt_shuffle(&mt, got, 3);
    expect(memcmp(got, want, sizeof(got)) == 0, "got %d %d %d, want %d %d %d", got[0], got[1], got[2], want[0],
           want[1], want[2]);
    mt_seed(&mt, 9);
    mt_shuffle(&mt, got, 1); // nothing to do: draws nothing
    mt_shuffle(&mt, got, 0);
    mt_seed(&by_hand, 9);
    expect(mt_next(&mt) == mt_next(&by_hand), "shuffling one element must not draw");
}

int main(void) {
    unit_run(test_philox_known_answers);
    unit_run(test_philox_streams_differ);
    unit_run(test_distributions);
    unit_run(test_mt_known_answer);
    unit_run(test_mt_matches_torch);
    unit_run(test_mt_normal_ragged);
    unit_run(test_mt_shuffle);
    return unit_report();
}
