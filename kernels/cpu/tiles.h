// SPDX-License-Identifier: Apache-2.0
// Attention of many rows of a request under one kv head, over tiles of keys.
#pragma once

#include "softmax.h"

namespace {

// c `[MR, NV vectors]` = (with `adds`, +=) a `[MR, depth]` times b `[depth, NV vectors]`, in one
// panel.
template <class F, int MR, int NV, class A>
inline void multiply_block(const typename F::Number *a, int64_t a_row,
                           const typename F::Number *b, A *c, int64_t c_row, int64_t depth,
                           bool adds) {
    V<A> acc[MR][NV];
#pragma GCC unroll 12
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) acc[m][j] = V<A>{};
    for (int64_t k = 0; k < depth; k++) {
        typename F::Vector right[NV];
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) right[j] = F::read(b + k * PANEL<A> + j * LANES<A>);
#pragma GCC unroll 12
        for (int m = 0; m < MR; m++) {
            const typename F::Vector left = F::everywhere(a[m * a_row + k]);
#pragma GCC unroll 2
            for (int j = 0; j < NV; j++) acc[m][j] = F::added(acc[m][j], left, right[j]);
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) {
            A *to = c + m * c_row + j * LANES<A>;
            store(to, adds ? load(to) + acc[m][j] : acc[m][j]);
        }
}

// The same for c `[rows, columns]`, with whole vectors of columns. Panels of b are `b_panel`
// factors apart.
template <class F, class A>
void multiply(const typename F::Number *a, int64_t a_row, const typename F::Number *b,
              int64_t b_panel, A *c, int64_t c_row, int64_t rows, int64_t columns, int64_t depth,
              bool adds) {
    for (int64_t n = 0; n < columns; n += PANEL<A>, b += b_panel) {
        const bool is_pair = n + LANES<A> < columns;
        int64_t m = 0;
#define BLOCKS(MB)                                                                                \
    for (; m + MB <= rows; m += MB)                                                               \
        if (is_pair)                                                                              \
            multiply_block<F, MB, 2>(a + m * a_row, a_row, b, c + m * c_row + n, c_row, depth,    \
                                     adds);                                                       \
        else                                                                                      \
            multiply_block<F, MB, 1>(a + m * a_row, a_row, b, c + m * c_row + n, c_row, depth,    \
                                     adds);
        BLOCKS(BLOCK_ROWS)
        BLOCKS(4)
        BLOCKS(1)
#undef BLOCKS
    }
}

// The sizes of a tile's buffers; `vectors` is rows times heads of a group.
template <class A> struct TileScratch {
    int64_t vectors, dim;

    int64_t of_rows() const { return vectors * dim; }
    int64_t of_scores() const { return SCORED_VECTORS * TILE_KEYS; }
    int64_t of_keys() const { return TILE_KEYS * dim; }
    int64_t of_values() const { return TILE_KEYS * round_up(dim, PANEL<A>); }
    int64_t of_sums() const { return round_up(vectors, LANES<A>) + SPARE<A>; }
    int64_t bytes() const {
        return (2 * of_rows() + of_scores() + of_keys() + of_values() + 3 * of_sums()) *
               int64_t(sizeof(A));
    }
};

// Packs keys and values of a tile into panels of factors: `[panels of keys, dim, PANEL]` and
// `[panels of dim, TILE_KEYS, PANEL]`, or half as many pairs. The tile has `count` tokens, of which
// the tokens from `first` on are read. Other tokens, up to whole vectors, are zeros.
template <class E, class F, class A>
void read_tile(const Step &step, int64_t index, int64_t head, int64_t tile, int64_t first,
               int64_t count, typename F::Number *keys, typename F::Number *values) {
    constexpr int64_t PANEL_ROWS = TILE_KEYS / F::DEPTH;
    const int64_t dim = step.head_dim, depth = dim / F::DEPTH;
    const E *from[TILE_KEYS], *value[TILE_KEYS + F::DEPTH];
    for (int64_t t = 0; t < count; t++) {
        from[t] = value[t] = nullptr;
        if (t < first) continue;
        const int64_t token = tile + t;
        const int64_t offset =
            token % step.block_size * step.token_stride + head * step.head_stride;
        from[t] = block_of<E>(step, step.keys, index, token) + offset;
        value[t] = block_of<E>(step, step.values, index, token) + offset;
    }
    for (int i = 0; i < F::DEPTH; i++) value[count + i] = nullptr;
    for (int64_t d = 0; d < dim; d += PANEL<A>, values += PANEL_ROWS * PANEL<A>)
        for (int64_t t = 0; t < count; t += F::DEPTH)
            F::keep_values(value + t, d, dim, values + t / F::DEPTH * PANEL<A>);
    for (int64_t t = 0; t < count; t += LANES<A>) {
        typename F::Number *to = keys + t / PANEL<A> * (depth * PANEL<A>) + t % PANEL<A>;
        for (int64_t d = 0; d < dim; d += LANES<A> * F::DEPTH) {
            V<A> square[LANES<A>];
            if (t >= first && t + LANES<A> <= count) {
#pragma GCC unroll 16
                for (int i = 0; i < LANES<A>; i++)
                    square[i] = (V<A>)F::of_elements(from[t + i] + d);
            } else {
                for (int i = 0; i < LANES<A>; i++)
                    square[i] = t + i < count && from[t + i]
                                    ? (V<A>)F::of_elements(from[t + i] + d)
                                    : V<A>{};
            }
            transpose<A>(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES<A>; i++)
                __builtin_memcpy(to + (d / F::DEPTH + i) * PANEL<A>, square + i, sizeof(V<A>));
        }
    }
}

// Computes attention of `rows` rows of a request, from `first_row` on, under one kv head, over all
// keys that the rows see.
template <class E, class F>
void attend_rows(const Step &step, int64_t index, const Request &request, int64_t first_row,
                 int64_t rows, int64_t head, char *scratch) {
    typedef typename Wide<E>::A A;
    typedef typename F::Number Number;
    constexpr int64_t PANEL_ROWS = TILE_KEYS / F::DEPTH;
    const int64_t group = step.heads / step.kv_heads, dim = step.head_dim;
    const int64_t vectors = rows * group, depth = dim / F::DEPTH;
    const TileScratch<A> size = {vectors, dim};
    A *out = (A *)scratch;
    A *scores = out + size.of_rows();
    A *tops = scores + size.of_scores();
    A *totals = tops + size.of_sums();
    A *shares = totals + size.of_sums();
    Number *q = (Number *)(shares + size.of_sums());
    Number *keys = q + size.of_rows();
    Number *values = keys + size.of_keys();
    const Softmax<A> softmax = {A(step.scale), A(step.softcap), tops, totals, shares};
    for (int64_t m = 0; m < vectors; m++) {
        const E *from = (const E *)step.q +
                        (request.first_row + first_row + m / group) * step.q_row +
                        (head * group + m % group) * step.q_head;
        F::keep_elements(from, dim, q + m * depth);
        for (int64_t d = 0; d < dim; d += LANES<A>) store(out + m * dim + d, V<A>{});
    }
    for (int64_t m = 0; m < size.of_sums(); m++) {
        tops[m] = -__builtin_inf();
        totals[m] = 0;
    }
    const int64_t begin = request.first_key(first_row, step.window);
    const int64_t end = request.end_key(first_row + rows - 1);
    for (int64_t tile = begin / TILE_KEYS * TILE_KEYS; tile < end; tile += TILE_KEYS) {
        const int64_t count = at_most(TILE_KEYS, end - tile);
        read_tile<E, F, A>(step, index, head, tile, at_least(begin - tile, 0), count, keys, values);
        // A few rows at a time, so that the scores stay in the cache, with the keys that the last
        // of these rows sees.
        for (int64_t done = 0; done < vectors; done += SCORED_VECTORS) {
            const int64_t here = at_most(SCORED_VECTORS, vectors - done);
            const int64_t last = first_row + (done + here - 1) / group;
            const int64_t seen = at_most(request.end_key(last) - tile, count);
            if (seen <= 0) continue;
            const int64_t width = round_up(seen, LANES<A>);
            multiply<F>(q + done * depth, depth, keys, depth * PANEL<A>, scores, TILE_KEYS, here,
                        width, depth, false);
            for (int64_t m = 0; m < here; m += LANES<A>) {
                const int64_t some = at_most(LANES<A>, here - m);
                const auto seen_by = [&](int64_t i) {
                    const int64_t row = first_row + (done + m + i) / group;
                    return Seen{at_least(request.first_key(row, step.window) - tile, 0),
                                at_least(at_most(request.end_key(row) - tile, count), 0)};
                };
                // The first row has the lowest end of visible keys, the last row the highest
                // beginning.
                const bool is_whole =
                    seen_by(0).end == width && seen_by(some - 1).first == 0;
                softmax.template weigh<F>(scores + m * TILE_KEYS, TILE_KEYS, done + m, some,
                                          width, is_whole, seen_by);
                for (int64_t i = done + m; i < done + m + some; i++)
                    if (shares[i] != 1)
                        for (int64_t d = 0; d < dim; d += LANES<A>)
                            store(out + i * dim + d, shares[i] * load(out + i * dim + d));
            }
            multiply<F>((const Number *)scores, TILE_KEYS, values, PANEL_ROWS * PANEL<A>,
                        out + done * dim, dim, here, dim, round_up(seen, F::DEPTH) / F::DEPTH,
                        true);
        }
    }
    for (int64_t m = 0; m < vectors; m++)
        give(out + m * dim, totals[m], dim, out_of<E>(step, request, head, first_row * group + m));
}

}  // namespace
