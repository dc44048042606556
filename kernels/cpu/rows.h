// SPDX-License-Identifier: Apache-2.0
// Computations on a row between products: the RMS norm, sums, conversions, and the rotation of
// heads.
#pragma once

#include "matrix.h"

namespace {

// Returns the reciprocal of the root mean square of `x`.
template <class A> inline A share_of(const A *x, int64_t count, A eps) {
    V<A> sums[4] = {V<A>{}, V<A>{}, V<A>{}, V<A>{}};
    int64_t d = 0;
    for (; d + 4 * LANES<A> <= count; d += 4 * LANES<A>)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const V<A> here = load(x + d + i * LANES<A>);
            sums[i] += here * here;
        }
    A total = sum<A>((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; d < count; d++) total += x[d] * x[d];
    const A mean = total / A(count) + eps;
    return A(1) / (sizeof(A) == 4 ? A(__builtin_sqrtf(float(mean)))
                                  : A(__builtin_sqrt(double(mean))));
}

// `out` = x divided by its root mean square, times `weight`.
template <class A, class O>
inline void normalise(const A *x, const A *weight, int64_t count, A eps, O *out) {
    const A share = share_of(x, count, eps);
    int64_t d = 0;
    for (; d + LANES<A> <= count; d += LANES<A>)
        narrow_vector(load(x + d) * share * load(weight + d), out + d);
    for (; d < count; d++) narrow(x[d] * share * weight[d], out + d);
}

template <class A> inline void add(const A *more, int64_t count, A *to) {
    int64_t d = 0;
    for (; d + LANES<A> <= count; d += LANES<A>) store(to + d, load(to + d) + load(more + d));
    for (; d < count; d++) to[d] += more[d];
}
template <class E, class A> inline void narrow_all(const A *from, int64_t count, E *to) {
    int64_t d = 0;
    for (; d + LANES<A> <= count; d += LANES<A>) narrow_vector(load(from + d), to + d);
    for (; d < count; d++) narrow(from[d], to + d);
}

// Norms a head, if there is a `weight`, and rotates it: element i of the first half is paired with
// element i of the second.
template <class E, class A>
inline void turn(const A *head, const A *weight, A eps, const E *cos, const E *sin, int64_t half,
                 E *out) {
    const A share = weight ? share_of(head, 2 * half, eps) : A(1);
    int64_t d = 0;
    for (; d + LANES<A> <= half; d += LANES<A>) {
        const V<A> c = load(cos + d), s = load(sin + d);
        V<A> left = load(head + d), right = load(head + half + d);
        if (weight) {
            left = left * share * load(weight + d);
            right = right * share * load(weight + half + d);
        }
        narrow_vector(left * c - right * s, out + d);
        narrow_vector(right * c + left * s, out + half + d);
    }
    for (; d < half; d++) {
        const A c = widened(cos[d]), s = widened(sin[d]);
        A left = head[d], right = head[half + d];
        if (weight) {
            left = left * share * weight[d];
            right = right * share * weight[half + d];
        }
        narrow(left * c - right * s, out + d);
        narrow(right * c + left * s, out + half + d);
    }
}

inline int64_t q_size(const Pass &pass) { return pass.heads * pass.head_dim; }
inline int64_t qkv_size(const Pass &pass) {
    return (pass.heads + 2 * pass.kv_heads) * pass.head_dim;
}

// Returns the smallest number of heads that fills whole panels.
template <class A> inline int64_t heads_together(const Pass &pass) {
    int64_t heads = 1;
    while (heads * pass.head_dim % PANEL<A>) heads++;
    return heads;
}
template <class A> inline int64_t heads_row(const Pass &pass) {
    return row_of<A>(heads_together<A>(pass) * pass.head_dim);
}
template <class A> inline int64_t heads_numbers(const Pass &pass) {
    return ROWS_AT_ONCE * heads_row<A>(pass);
}

// The target of a layer's queries, keys and values. Results are kept, in the cache, until whole
// heads are complete; then the heads are rotated and written to `q` or to the pool.
template <class E, class A> struct Heads {
    const Pass &pass;
    const LayerWeights &layer;
    const Matrix &matrix;
    const int64_t *of_step;  // the row in the step of each row; null: the same row
    E *q;
    A *kept;  // [rows, heads, head_dim], rows are `kept_row` apart
    int64_t kept_row;
    int64_t first_row, rows, first_head;
    int64_t together, unit;  // `together` heads fill `unit` panels

    inline void operator()(int64_t row, int64_t panel, const A *values) const {
        add_bias(matrix, panel, values, kept + row * kept_row + panel % unit * PANEL<A>);
    }
    void send_for(int64_t, int64_t) const {}
    void end(int64_t panel) const {
        if ((panel + 1) % unit && panel + 1 < panels_of<A>(matrix)) return;
        const int64_t dim = pass.head_dim, first = panel / unit * together;
        const int64_t count = at_most(together, matrix.outs / dim - first);
        const Step &step = pass.steps[layer.view];
        for (int64_t i = 0; i < rows; i++) {
            const int64_t row = of_step ? of_step[first_row + i] : first_row + i;
            for (int64_t h = 0; h < count; h++)
                take(step, row, first_row + i, first_head + first + h,
                     kept + i * kept_row + h * dim);
        }
    }

    void take(const Step &step, int64_t row, int64_t q_row, int64_t head, const A *from) const {
        if (head < pass.heads) {
            turn_head(row, head, from, q + q_row * q_size(pass) + head * pass.head_dim);
            return;
        }
        const int64_t slot = step.slots[row], turning = pass.heads + pass.kv_heads;
        if (slot < 0) return;
        const int64_t to = slot / step.block_size * step.block_stride +
                           slot % step.block_size * step.token_stride;
        if (head < turning)
            turn_head(row, head, from,
                      (E *)layer.keys + to + (head - pass.heads) * step.head_stride);
        else
            narrow_all(from, pass.head_dim,
                       (E *)layer.values + to + (head - turning) * step.head_stride);
    }

    void turn_head(int64_t row, int64_t head, const A *from, E *to) const {
        const int64_t dim = pass.head_dim, place = pass.positions[row] * (dim / 2);
        const A *norms = (const A *)layer.head_norms;
        turn(from, norms ? norms + head * dim : nullptr, A(pass.eps), (const E *)layer.cos + place,
             (const E *)layer.sin + place, dim / 2, to);
    }
};

}  // namespace
