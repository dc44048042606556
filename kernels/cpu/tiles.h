// SPDX-License-Identifier: Apache-2.0
// Many rows of a request under one kv head, over tiles of the keys that they see.
#pragma once

#include "context.h"

namespace {

// c `[MR, NV vectors]` = or += a `[MR, depth]` times b `[depth, NV vectors]`, of a panel.
template <int MR, int NV, class A>
inline void multiply_block(const A *a, int64_t a_row, const A *b, A *c, int64_t c_row,
                           int64_t depth, bool adds) {
    V<A> acc[MR][NV];
#pragma GCC unroll 12
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) acc[m][j] = V<A>{};
    for (int64_t k = 0; k < depth; k++) {
        V<A> right[NV];
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) right[j] = load(b + k * PANEL<A> + j * LANES<A>);
#pragma GCC unroll 12
        for (int m = 0; m < MR; m++) {
            V<A> left = all_of(a[m * a_row + k]);
#pragma GCC unroll 2
            for (int j = 0; j < NV; j++) acc[m][j] += left * right[j];
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

// c `[rows, columns]`, columns in whole vectors. Panels of b are `b_panel` numbers apart.
template <class A>
void multiply(const A *a, int64_t a_row, const A *b, int64_t b_panel, A *c, int64_t c_row,
              int64_t rows, int64_t columns, int64_t depth, bool adds) {
    constexpr int MR = VECTOR_BYTES == 64 ? 12 : 6;
    for (int64_t n = 0; n < columns; n += PANEL<A>, b += b_panel) {
        const bool is_pair = n + LANES<A> < columns;
        int64_t m = 0;
#define BLOCKS(MB)                                                                               \
    for (; m + MB <= rows; m += MB)                                                              \
        if (is_pair)                                                                             \
            multiply_block<MB, 2>(a + m * a_row, a_row, b, c + m * c_row + n, c_row, depth,      \
                                  adds);                                                         \
        else                                                                                     \
            multiply_block<MB, 1>(a + m * a_row, a_row, b, c + m * c_row + n, c_row, depth, adds);
        BLOCKS(MR)
        BLOCKS(4)
        BLOCKS(1)
#undef BLOCKS
    }
}

// Keys and values of a tile into panels, `[panels of keys, dim, PANEL]` and `[panels of dim,
// TILE_KEYS, PANEL]`. There are `count` in the tile, of which those from `first` on are read; the
// others, up to whole vectors, are zeros.
template <class E, class A>
void read_tile(const Step &step, int64_t index, int64_t head, int64_t tile, int64_t first,
               int64_t count, A *keys, A *values) {
    const int64_t dim = step.head_dim;
    const E *from[TILE_KEYS];
    for (int64_t t = first; t < count; t++) {
        const int64_t token = tile + t;
        const int64_t offset =
            token % step.block_size * step.token_stride + head * step.head_stride;
        from[t] = block_of<E>(step, step.keys, index, token) + offset;
        const E *value = block_of<E>(step, step.values, index, token) + offset;
        for (int64_t d = 0; d < dim; d += LANES<A>)
            store(values + d / PANEL<A> * (TILE_KEYS * PANEL<A>) + t * PANEL<A> + d % PANEL<A>,
                  load(value + d));
    }
    for (int64_t t = 0; t < first; t++)
        for (int64_t d = 0; d < dim; d += LANES<A>)
            store(values + d / PANEL<A> * (TILE_KEYS * PANEL<A>) + t * PANEL<A> + d % PANEL<A>,
                  V<A>{});
    for (int64_t t = 0; t < count; t += LANES<A>) {
        A *to = keys + t / PANEL<A> * (dim * PANEL<A>) + t % PANEL<A>;
        for (int64_t d = 0; d < dim; d += LANES<A>) {
            V<A> square[LANES<A>];
            if (t >= first && t + LANES<A> <= count) {
#pragma GCC unroll 16
                for (int i = 0; i < LANES<A>; i++) square[i] = load(from[t + i] + d);
            } else {
                for (int i = 0; i < LANES<A>; i++)
                    square[i] = t + i >= first && t + i < count ? load(from[t + i] + d) : V<A>{};
            }
            transpose<A>(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES<A>; i++) store(to + (d + i) * PANEL<A>, square[i]);
        }
    }
}

// Rows `first_row` ... of a request under one kv head, over all the keys they see.
template <class E>
void attend_rows(const Step &step, int64_t index, const Request &request, int64_t first_row,
                 int64_t rows, int64_t head, char *scratch) {
    typedef typename Wide<E>::A A;
    const int64_t group = step.heads / step.kv_heads, dim = step.head_dim;
    const int64_t vectors = rows * group;
    A *q = (A *)scratch;
    A *out = q + vectors * dim;
    A *scores = out + vectors * dim;
    A *keys = scores + vectors * TILE_KEYS;
    A *values = keys + TILE_KEYS * dim;
    A *tops = values + TILE_KEYS * round_up(dim, PANEL<A>);
    A *totals = tops + vectors;
    for (int64_t m = 0; m < vectors; m++) {
        const E *from = (const E *)step.q +
                        (request.first_row + first_row + m / group) * step.q_row +
                        (head * group + m % group) * step.q_head;
        for (int64_t d = 0; d < dim; d += LANES<A>) {
            store(q + m * dim + d, load(from + d));
            store(out + m * dim + d, V<A>{});
        }
        tops[m] = -__builtin_inf();
        totals[m] = 0;
    }
    const int64_t begin = request.first_key(first_row, step.window);
    const int64_t end = request.end_key(first_row + rows - 1);
    for (int64_t tile = begin / TILE_KEYS * TILE_KEYS; tile < end; tile += TILE_KEYS) {
        const int64_t count = at_most(TILE_KEYS, end - tile);
        read_tile<E>(step, index, head, tile, at_least(begin - tile, 0), count, keys, values);
        // Where the first row does not see the whole tile, rows are taken a few at a time, each
        // with as many keys as the last of them sees.
        const bool is_seen = request.end_key(first_row) - tile >= count;
        const int64_t each = is_seen ? vectors : DIAGONAL_VECTORS;
        for (int64_t done = 0; done < vectors; done += each) {
            const int64_t here = at_most(each, vectors - done);
            const int64_t last = first_row + (done + here - 1) / group;
            const int64_t seen = at_most(request.end_key(last) - tile, count);
            if (seen <= 0) continue;
            const int64_t width = round_up(seen, LANES<A>);
            A *weights = scores + done * TILE_KEYS;
            multiply(q + done * dim, dim, keys, dim * PANEL<A>, weights, TILE_KEYS, here, width,
                     dim, false);
            for (int64_t m = done; m < done + here; m++) {
                const int64_t row = first_row + m / group;
                const int64_t from = at_least(request.first_key(row, step.window) - tile, 0);
                const int64_t to = at_least(at_most(request.end_key(row) - tile, count), 0);
                A *of_row = scores + m * TILE_KEYS;
                if (from >= to) {
                    for (int64_t t = 0; t < width; t += LANES<A>) store(of_row + t, V<A>{});
                    continue;
                }
                const A before = tops[m];
                const bool is_whole = from == 0 && to == TILE_KEYS && !(step.softcap > 0);
                const A total = is_whole
                                    ? weights_of_tile(of_row, A(step.scale), tops + m)
                                    : weights_of(of_row, from, to, width, A(step.scale),
                                                 A(step.softcap), tops + m);
                if (tops[m] != before) {
                    const A share = exponential(all_of(before - tops[m]))[0];
                    totals[m] *= share;
                    for (int64_t d = 0; d < dim; d += LANES<A>)
                        store(out + m * dim + d, share * load(out + m * dim + d));
                }
                totals[m] += total;
            }
            multiply(weights, TILE_KEYS, values, TILE_KEYS * PANEL<A>, out + done * dim, dim, here,
                     dim, seen, true);
        }
    }
    for (int64_t m = 0; m < vectors; m++)
        give(out + m * dim, totals[m], dim, out_of<E>(step, request, head, first_row * group + m));
}

}  // namespace
