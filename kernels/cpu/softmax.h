// SPDX-License-Identifier: Apache-2.0
// Scores that become weights, a vector's lanes of rows at a time, so that their largest scores and
// their sums are looked for together.
//
// Of float32, a weight is a power of two: scores are multiplied by log2(e) as by their scale, and
// what is a logarithm here is one to the base of 2. Of float64 it is a power of e.
#pragma once

#include "factors.h"

namespace {

template <class A> constexpr A UNIT = A(1);  // what scores are multiplied by
template <> constexpr float UNIT<float> = 1.44269504f;

// 2 to the power of x, for x up to 127: within 2 units in the last place above -126, 0 below.
inline FloatVector weight_of(FloatVector x) {
    const float lowest = -126.0f;
    // The nearest integer, by a sum whose last place is 1.
    const float shift = 12582912.0f;
    const FloatVector shifted = x + shift;
    const FloatVector r = x - (shifted - shift);
    // The polynomial of this degree with the smallest error for r from -1/2 to 1/2 that is 1 at 0.
    FloatVector p = all_of(0.00015353359f);
    p = p * r + 0.0013398875f;
    p = p * r + 0.009618438f;
    p = p * r + 0.055503324f;
    p = p * r + 0.24022648f;
    p = p * r + 0.6931472f;
    p = p * r + 1.0f;
    // The bits of `shifted` end in those of the integer, which go where the exponent is.
    const WordVector power = ((WordVector)shifted << 23) + (127u << 23);
    const FloatVector result = p * (FloatVector)power;
    return x < lowest ? FloatVector{} : result;
}
inline DoubleVector weight_of(DoubleVector x) { return exponential(x); }

// Numbers that are kept for each row are padded by this many, for whole vectors of them.
template <class A> constexpr int64_t SPARE = LANES<A>;

// Of the scores of a row, those that count.
struct Seen {
    int64_t first, end;
};

template <class A> struct Softmax {
    A scale, softcap;    // softcap 0: scores are not capped
    A *tops;             // [rows]: the largest score so far, times `scale` and UNIT; -inf: none
    A *totals, *shares;  // [rows]: sums of weights, and what the last call multiplied them by

    // Scores `[rows, width]` in rows of `row_stride` become weights in their place, where `row` is
    // the first one's number; up to LANES rows, `width` in whole vectors. `seen(i)` tells which
    // scores of the i-th row count, unless `is_whole` says that all do; others become 0. Weights are
    // relative to the largest score so far: results so far have to be multiplied by `shares`. As
    // factors they take the beginning of the row.
    template <class F, class Of>
    inline void weigh(A *scores, int64_t row_stride, int64_t row, int64_t rows, int64_t width,
                      bool is_whole, Of seen) const {
        const A unit = softcap > 0 ? UNIT<A> : scale * UNIT<A>;
        const V<A> lowest = all_of(-(A)__builtin_inf());
        V<A> best[LANES<A>], total[LANES<A>];
        for (int64_t i = rows; i < LANES<A>; i++) {
            best[i] = lowest;
            total[i] = V<A>{};
        }
        for (int64_t i = 0; i < rows; i++) {
            A *of_row = scores + i * row_stride;
            if (softcap > 0)
                for (int64_t t = 0; t < width; t += LANES<A>)
                    store(of_row + t, softcap * tangent(load(of_row + t) * (scale / softcap)));
            if (!is_whole) {
                const Seen here = seen(i);
                for (int64_t t = 0; t < at_most(here.first, width); t++)
                    of_row[t] = -__builtin_inf();
                for (int64_t t = at_least(here.end, here.first); t < width; t++)
                    of_row[t] = -__builtin_inf();
            }
            V<A> largest = lowest;
            for (int64_t t = 0; t < width; t += LANES<A>) {
                const V<A> score = load(of_row + t);
                largest = score > largest ? score : largest;
            }
            best[i] = largest;
        }
        const V<A> found = maxima(best) * unit, before = load(tops + row);
        const V<A> now = found > before ? found : before;
        const V<A> taken = now == lowest ? V<A>{} : now;
        const V<A> share = weight_of(before - taken);
        store(tops + row, now);
        store(shares + row, share);
        A off[LANES<A>];
        store(off, taken);
        for (int64_t i = 0; i < rows; i++) {
            A *of_row = scores + i * row_stride;
            const V<A> less = all_of(off[i]);
            V<A> sum = {};
            for (int64_t t = 0; t < width; t += F::DEPTH * LANES<A>) {
                V<A> weight[F::DEPTH];
                for (int j = 0; j < F::DEPTH; j++)
                    weight[j] = t + j * LANES<A> < width
                                    ? weight_of(load(of_row + t + j * LANES<A>) * unit - less)
                                    : V<A>{};
                F::keep(weight, (typename F::Number *)of_row + t / F::DEPTH, sum);
            }
            total[i] = sum;
        }
        store(totals + row, load(totals + row) * share + sums(total));
    }
};

}  // namespace
