/* Inner loops of the rules that need no data: one walk through memory where torch takes one per operation.

   Each function gives the bits of the torch (or NumPy) code that it stands in for, so nothing is contracted,
   reordered or approximated: build with -ffp-contract=off and without -ffast-math. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

enum { CHUNK = 512 }; /* entries, so that what is in the making stays in the first cache */

static inline uint64_t bits_of(double x) { uint64_t b; memcpy(&b, &x, 8); return b; }
static inline double double_of(uint64_t b) { double x; memcpy(&x, &b, 8); return x; }
static inline uint32_t bits_of_float(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static inline float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* |x| rounded to float32, as an integer that sorts as |x| does. */
static inline int32_t magnitude(double x) { return (int32_t)(bits_of_float((float)x) & 0x7FFFFFFFu); }

/* out = x_0 w_0 + x_1 w_1 + ..., added up in this order; divided, unless `divisor` is 1. Models lie `stride`
   entries apart. */
FOR_EACH_CPU void merging_weighted_sum(const double *restrict x, int64_t stride, int64_t models, const double *weights,
                                       double divisor, int64_t count, double *restrict out) {
    for (int64_t start = 0; start < count; start += CHUNK) {
        int64_t size = least(CHUNK, count - start);
        double sum[CHUNK];
        const double *first = x + start;
        for (int64_t j = 0; j < size; j++) sum[j] = first[j] * weights[0];
        for (int64_t i = 1; i < models; i++) {
            const double *next = x + i * stride + start;
            double weight = weights[i];
            for (int64_t j = 0; j < size; j++) sum[j] += next[j] * weight;
        }
        if (divisor == 1.0)
            for (int64_t j = 0; j < size; j++) out[start + j] = sum[j];
        else
            for (int64_t j = 0; j < size; j++) out[start + j] = sum[j] / divisor;
    }
}

static inline uint32_t bfloat16_of(float x) { /* to nearest even */
    uint32_t b = bits_of_float(x);
    uint32_t rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
    return (b & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded;
}

static float to_odd(double x) { /* of the two neighbours of an inexact value, that whose last bit is 1 */
    float near = (float)x;
    if ((double)near == x || (bits_of_float(near) & 1u)) return near;
    return nextafterf(near, x > (double)near ? INFINITY : -INFINITY);
}

/* float64 to bfloat16, correctly rounded; returns the largest magnitude among the results, as its bits. */
FOR_EACH_CPU int32_t merging_to_bfloat16(const double *restrict x, int64_t count, uint16_t *restrict out) {
    const uint64_t dropped = (1ull << 29) - 1, sign = 1ull << 63;
    const uint64_t smallest = bits_of(0x1p-126); /* float32's normal numbers begin here */
    uint32_t largest = 0;
    for (int64_t start = 0; start < count; start += CHUNK) {
        int64_t size = least(CHUNK, count - start);
        uint64_t tiny = 0;
        for (int64_t j = 0; j < size; j++) {
            uint64_t b = bits_of(x[start + j]);
            uint64_t odd = (((b & dropped) + dropped) | b) & ~dropped;
            uint32_t result = bfloat16_of((float)double_of(odd));
            uint32_t size_of = result & 0x7FFFu;
            uint64_t unsigned_bits = b & ~sign;
            tiny |= (uint64_t)(unsigned_bits < smallest) & (uint64_t)(unsigned_bits != 0);
            largest = size_of > largest ? size_of : largest;
            out[start + j] = (uint16_t)result;
        }
        if (tiny)
            for (int64_t j = 0; j < size; j++)
                if (fabs(x[start + j]) < 0x1p-126) out[start + j] = (uint16_t)bfloat16_of(to_odd(x[start + j]));
    }
    return (int32_t)largest;
}

/* Entries whose magnitude lies `window` or more above `low` are counted in `above`; how far above `low` those
   between lie is written to `near`, whose length is returned. */
FOR_EACH_CPU int64_t merging_near(const double *restrict x, int64_t count, int32_t low, int32_t window, int64_t *above,
                                  int32_t *near) {
    int64_t larger = 0, found = 0;
    for (int64_t start = 0; start < count; start += 64) {
        int64_t size = least(64, count - start);
        int32_t from_low[64], reached = 0, inside = 0;
        for (int64_t j = 0; j < size; j++) {
            from_low[j] = magnitude(x[start + j]) - low;
            reached += from_low[j] >= window;
            inside |= (uint32_t)from_low[j] < (uint32_t)window;
        }
        larger += reached;
        if (inside)
            for (int64_t j = 0; j < size; j++) {
                near[found] = from_low[j];
                found += (uint32_t)from_low[j] < (uint32_t)window;
            }
    }
    *above += larger;
    return found;
}

/* Counts the magnitudes by their upper 15 bits, or, where `high` is not negative, by the lower 16 those whose upper 15
   are `high`. */
FOR_EACH_CPU void merging_count(const double *restrict x, int64_t count, int32_t high, int64_t *counts) {
    for (int64_t start = 0; start < count; start += 64) {
        int64_t size = least(64, count - start);
        int32_t of[64], inside = 0;
        for (int64_t j = 0; j < size; j++) {
            of[j] = magnitude(x[start + j]);
            inside |= (of[j] >> 16) == high;
        }
        if (high < 0)
            for (int64_t j = 0; j < size; j++) counts[of[j] >> 16]++;
        else if (inside)
            for (int64_t j = 0; j < size; j++)
                if ((of[j] >> 16) == high) counts[of[j] & 0xFFFF]++;
    }
}

/* TIES of deltas (models `stride` entries apart): entries below their model's threshold (magnitude, as bits)
   count as 0; each is times its model's weight; an entry's sign is that of their sum, or `sign_of_zero` where
   they cancel, and 0 where there is nothing. `out`: the sum of those of that sign, divided by their weights'
   sum (at least `lightest`) if `mean`. Returns how many entries cancelled. */
FOR_EACH_CPU int64_t merging_ties(const double *restrict x, int64_t stride, int64_t models, const int32_t *thresholds,
                                  const double *weights, double lightest, int32_t mean, double sign_of_zero,
                                  int64_t count, double *restrict out) {
    int64_t cancelled = 0;
    for (int64_t start = 0; start < count; start += CHUNK) {
        int64_t size = least(CHUNK, count - start);
        double sign[CHUNK], total[CHUNK], divisor[CHUNK];
        uint64_t some[CHUNK];
        for (int64_t j = 0; j < size; j++) { sign[j] = 0; some[j] = 0; total[j] = 0; divisor[j] = 0; }
        for (int64_t i = 0; i < models; i++) {
            const double *deltas = x + i * stride + start;
            for (int64_t j = 0; j < size; j++) {
                double kept = (magnitude(deltas[j]) >= thresholds[i] ? deltas[j] : 0) * weights[i];
                sign[j] += kept;
                some[j] |= kept != 0;
            }
        }
        int64_t none = 0;
        for (int64_t j = 0; j < size; j++) {
            double sum = sign[j];
            uint64_t lost = (uint64_t)(sum == 0) & some[j];
            none += (int64_t)lost;
            sum = sum > 0 ? 1.0 : sum < 0 ? -1.0 : sum; /* NaN stays */
            sign[j] = lost ? sign_of_zero : sum;
        }
        cancelled += none;
        for (int64_t i = 0; i < models; i++) {
            const double *deltas = x + i * stride + start;
            double weight = weights[i];
            for (int64_t j = 0; j < size; j++) {
                double kept = (magnitude(deltas[j]) >= thresholds[i] ? deltas[j] : 0) * weight;
                double along = kept * sign[j];
                along = along < 0 ? 0 : along;
                total[j] += along;
                divisor[j] += along > 0 ? weight : 0;
            }
        }
        for (int64_t j = 0; j < size; j++) {
            double sum = total[j] * sign[j];
            double weight = divisor[j] < lightest ? lightest : divisor[j];
            out[start + j] = mean ? sum / weight : sum;
        }
    }
    return cancelled;
}

/* products[i][j] += <x_i, x_j>, of models `stride` entries apart; both halves. */
FOR_EACH_CPU void merging_products(const double *restrict x, int64_t stride, int64_t models, int64_t count,
                                   double *restrict products) {
    for (int64_t start = 0; start < count; start += CHUNK) {
        int64_t size = least(CHUNK, count - start), whole = size / 8 * 8;
        for (int64_t i = 0; i < models; i++)
            for (int64_t k = i; k < models; k++) {
                const double *a = x + i * stride + start, *b = x + k * stride + start;
                double lanes[8] = {0}, sum = 0;
                for (int64_t j = 0; j < whole; j += 8)
                    for (int64_t l = 0; l < 8; l++) lanes[l] += a[j + l] * b[j + l];
                for (int64_t l = 0; l < 8; l++) sum += lanes[l];
                for (int64_t j = whole; j < size; j++) sum += a[j] * b[j];
                products[i * models + k] += sum;
                if (i != k) products[k * models + i] += sum;
            }
    }
}

/* The sum over all entries of the signs (-1, 0 or 1) that `merging_ties` would elect, cancelled ones being 0. */
FOR_EACH_CPU int64_t merging_balance(const double *restrict x, int64_t stride, int64_t models,
                                     const int32_t *thresholds, const double *weights, int64_t count) {
    int64_t balance = 0;
    for (int64_t start = 0; start < count; start += CHUNK) {
        int64_t size = least(CHUNK, count - start);
        double sum[CHUNK];
        for (int64_t j = 0; j < size; j++) sum[j] = 0;
        for (int64_t i = 0; i < models; i++) {
            const double *deltas = x + i * stride + start;
            int32_t threshold = thresholds[i];
            double weight = weights[i];
            for (int64_t j = 0; j < size; j++)
                sum[j] += (magnitude(deltas[j]) >= threshold ? deltas[j] : 0) * weight;
        }
        for (int64_t j = 0; j < size; j++) balance += (int64_t)(sum[j] > 0) - (int64_t)(sum[j] < 0);
    }
    return balance;
}

/* x = (x if its entry of the mask is 1, else 0) / divisor. A product, not a choice: NaN and infinity stay, so that
   the sink finds them. */
FOR_EACH_CPU void merging_keep(double *restrict x, const uint8_t *restrict mask, double divisor, int64_t count) {
    if (divisor == 1.0)
        for (int64_t j = 0; j < count; j++) x[j] *= mask[j];
    else
        for (int64_t j = 0; j < count; j++) x[j] = x[j] * mask[j] / divisor;
}

/* bfloat16 to float64; less `base`, where that is given. */
FOR_EACH_CPU void merging_from_bfloat16(const uint16_t *x, const double *base, int64_t count, double *restrict out) {
    if (base)
        for (int64_t j = 0; j < count; j++) out[j] = (double)float_of((uint32_t)x[j] << 16) - base[j];
    else
        for (int64_t j = 0; j < count; j++) out[j] = (double)float_of((uint32_t)x[j] << 16);
}

/* total += scale x part, for `rows` rows of `columns` entries that lie so far apart as the strides say. */
FOR_EACH_CPU void merging_add_scaled(double *restrict total, int64_t total_stride, const float *restrict part,
                                     int64_t part_stride, double scale, int64_t rows, int64_t columns) {
    for (int64_t row = 0; row < rows; row++) {
        double *restrict into = total + row * total_stride;
        const float *restrict from = part + row * part_stride;
        for (int64_t j = 0; j < columns; j++) into[j] += (double)from[j] * scale;
    }
}

/* How many of the entries, at any address, have an exponent of ones: those that are infinite or no number. */
#define NOT_FINITE(bits)                                                                                          \
    FOR_EACH_CPU int64_t merging_not_finite_##bits(const uint8_t *x, uint64_t ones, int64_t count) {              \
        const uint##bits##_t mask = (uint##bits##_t)ones;                                                         \
        int64_t found = 0;                                                                                        \
        for (int64_t start = 0; start < count; start += CHUNK) {                                                  \
            int64_t size = least(CHUNK, count - start);                                                           \
            uint##bits##_t inside = 0;                                                                            \
            for (int64_t j = 0; j < size; j++) {                                                                  \
                uint##bits##_t entry;                                                                             \
                memcpy(&entry, x + (start + j) * (int64_t)sizeof entry, sizeof entry);                            \
                inside += (entry & mask) == mask;                                                                 \
            }                                                                                                     \
            found += (int64_t)inside;                                                                             \
        }                                                                                                         \
        return found;                                                                                             \
    }
NOT_FINITE(16)
NOT_FINITE(32)
NOT_FINITE(64)
