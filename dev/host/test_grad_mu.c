// lib/grad_mu.h: the shared scale at the ends of FP32, and mu from step to step.
#include "grad_mu.h"

#include "unit.h"

static void test_scale(void) {
    const float amaxes[] = {1e-45f, 1e-38f, 1e-36f, 3e-5f, 1.0f, 448.0f, 65504.0f, 1e30f, 3.4028235e38f};
    const float mus[] = {0x1p-20f, 0.37f, 1.0f, 0x1p10f};
    for (int i = 0; i < 9; i++) {
        for (int k = 0; k < 4; k++) {
            GradBlockScale s = grad_shared_scale(amaxes[i], mus[k]);
            double exact = 448.0 / (double)amaxes[i] * (double)mus[k];
            double want = fmin(fmax(exact, 0x1p-126), 0x1p126);
            expect(s.has_codes && fabs((double)s.scale - want) <= 0x1p-22 * want, "amax %g, mu %g: scale %g, want %g",
                   (double)amaxes[i], (double)mus[k], (double)s.scale, want);
            expect(isnormal(s.scale) && isnormal(s.descale) && s.descale == 1.0f / s.scale,
                   "amax %g, mu %g: scale %a, descale %a", (double)amaxes[i], (double)mus[k], (double)s.scale,
                   (double)s.descale);
        }
    }
    GradBlockScale zero = grad_shared_scale(0.0f, 1.0f);
    expect(!zero.has_codes && zero.descale == 0.0f, "amax 0: descale %g, want 0", (double)zero.descale);
    const float bad[] = {INFINITY, NAN};
    for (int i = 0; i < 2; i++) {
        GradBlockScale s = grad_shared_scale(bad[i], 1.0f);
        expect(!s.has_codes && isnan(s.descale), "amax %g: descale %g, want NaN", (double)bad[i], (double)s.descale);
    }
}

static void test_steps(void) {
    const uint64_t n = 10000000;
    expect(grad_mu_next(1.0, 101, n, 0) == 0.5, "101 of 10,000,000: mu is not halved");
    expect(grad_mu_next(1.0, n, n, 0) == 0.5, "all saturated: mu is not halved");
    expect(grad_mu_next(1.0, 100, n, 0) > 1.0, "100 of 10,000,000: mu does not grow");
    expect(grad_mu_next(0.25, 0, n, 1) == 0.25 && grad_mu_next(0.25, n, n, 1) == 0.25, "a skipped step moves mu");
    double mu = 0.25;
    for (int step = 0; step < 1000; step++) {
        mu = grad_mu_next(mu, 0, n, 0);
    }
    expect(fabs(mu - 0.5) < 1e-12, "after 1,000 steps without saturation mu is %.15g, want 0.5", mu);
    double low = 1.0, high = 1.0;
    for (int step = 0; step < 20000; step++) {
        low = grad_mu_next(low, n, n, 0);
        high = grad_mu_next(high, 0, n, 0);
    }
    expect(low == GRAD_MU_MIN && high == GRAD_MU_MAX, "the ends are %g and %g, want %g and %g", low, high, GRAD_MU_MIN,
           GRAD_MU_MAX);
    expect(grad_mu_next(low, 0, n, 0) > low && grad_mu_next(high, n, n, 0) < high, "mu stays at its end");
}

// Where the values are such that more than 1 in 100,000 saturates above mu = 0.3, mu goes there and stays.
static void test_settles(void) {
    double mu = GRAD_MU_START, least = 1.0, most = 0.0;
    for (int step = 0; step < 5000; step++) {
        mu = grad_mu_next(mu, mu > 0.3 ? 11 : 10, 1000000, 0);
        if (step > 2000) {
            least = fmin(least, mu);
            most = fmax(most, mu);
        }
    }
    expect(least > 0.14 && least < 0.16 && most > 0.29 && most < 0.301, "mu is between %g and %g, want 0.15 and 0.3",
           least, most);
}

static void bad_mu(void* unused) {
    (void)unused;
    grad_mu_next(0.0, 0, 1, 0);
}
static void bad_count(void* unused) {
    (void)unused;
    grad_mu_next(1.0, 2, 1, 0);
}

static void test_errors(void) {
    expect_dies(bad_mu, NULL, "grad mu is 0, want");
    expect_dies(bad_count, NULL, "2 of 1 elements");
}

int main(void) {
    unit_run(test_scale);
    unit_run(test_steps);
    unit_run(test_settles);
    unit_run(test_errors);
    return unit_report();
}
