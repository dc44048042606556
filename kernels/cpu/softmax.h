// SPDX-License-Identifier: Apache-2.0
// The softmax of scores, for as many rows at a time as a vector has lanes, so that the maxima and
// the sums of all these rows are computed together.
//
// With float32, weights are powers of 2: the scale of the scores includes log2(e), and all
// logarithms have base 2. With float64, weights are powers of e.
#pragma once

#include "factors.h"

namespace {

template <class A> constexpr A UNIT = A(1);  // an additional factor of the scores
template <> constexpr float UNIT<float> = 1.44269504f;

// Returns 2 to the power of x, for x up to 127: within 2 units in the last place for x from -126,
// else 0.
inline FloatVector weight_of(FloatVector x) {
    const float lowest = -126.0f;
    // The addition of `shift` rounds to an integer, because the last place of the sum is 1.
    const float shift = 12582912.0f;
    const FloatVector shifted = x + shift;
    const FloatVector r = x - (shifted - shift);
    // Of the polynomials of this degree that are 1 at 0, the one with the smallest error for r from
    // -1/2 to 1/2.
    FloatVector p = all_of(0.00015353359f);
    p = p * r + 0.0013398875f;
    p = p * r + 0.009618438f;
    p = p * r + 0.055503324f;
    p = p * r + 0.24022648f;
    p = p * r + 0.6931472f;
    p = p * r + 1.0f;
    // The last bits of `shifted` are the integer; they are moved to the bits of the exponent.
    const WordVector power = ((WordVector)shifted << 23) + (127u << 23);
    const FloatVector result = p * (FloatVector)power;
    return x < lowest ? FloatVector{} : result;
}
inline DoubleVector weight_of(DoubleVector x) { return exponential(x); }

// Arrays with one number per row are padded by SPARE numbers, so that whole vectors can be read.
template <class A> constexpr int64_t SPARE = LANES<A>;

// The keys that a row sees: from `first` to before `end`.
struct Seen {
    int64_t first, end;
};

template <class A> struct Softmax {
    A scale, softcap;    // softcap 0: scores are not capped
    A *tops;             // [rows]: the largest score so far, times `scale` and UNIT; -inf: no score
    A *totals, *shares;  // [rows]: sums of weights, and their factors in the last call

    // Replaces scores `[rows, width]`, whose rows are `row_stride` apart, by weights. The first row
    // is row `row`; there are up to LANES rows, and `width` is a multiple of LANES. `seen(i)`
    // returns the keys that the i-th row sees; the weights of other keys become 0. With `is_whole`,
    // all rows see all keys. Weights are relative to the largest score so far, so the caller must
    // multiply earlier results by `shares`. Weights that are stored as pairs fill only the
    // beginning of a row.
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
