// SPDX-License-Identifier: Apache-2.0
// The addition of a LoRA adapter, `(x @ in.T) @ out.T`, to a product, for the rows that have an
// adapter.
//
//     shrink    rows and ranks: `inner` `[rows, rank]` = x @ in.T
//     add       panels: a panel's results += inner @ out.T, before bias and activation
//
// One product computes rows with different adapters and rows without an adapter. Rows with the same
// adapter share the loads of the adapter. The sums of a row always have the same order, whatever
// other rows are computed.
#pragma once

#include "context.h"
#include "step.h"
#include "vectors.h"

namespace {

constexpr int RANKS_TOGETHER = 4;  // the rank of an adapter is a multiple of this
constexpr int ROWS_TOGETHER = VECTOR_BYTES == 64 ? 4 : 2;  // rows that share loads of an adapter
// The rows and ranks of one task of the phase `shrink`.
constexpr int64_t ROWS_OF_SHRINK = 32, RANKS_OF_SHRINK = 8;

// Some rows that have the same adapter.
struct Alike {
    const Adapter *adapter;
    int32_t count;
    int32_t rows[ROWS_TOGETHER];
};

// Groups at most 64 rows by adapter; `adapter_of(row)` is null for a row without an adapter.
// Returns the number of groups, at most one for each row.
template <class AdapterOf>
inline int64_t group_rows(int64_t first, int64_t rows, AdapterOf adapter_of, Alike *groups) {
    const Adapter *adapters[64];
    uint64_t left = 0;
    for (int64_t i = 0; i < rows; i++) {
        adapters[i] = adapter_of(first + i);
        left |= uint64_t(adapters[i] != nullptr) << i;
    }
    int64_t count = 0;
    while (left) {
        Alike &group = groups[count++];
        group.adapter = adapters[__builtin_ctzll(left)];
        group.count = 0;
        for (uint64_t rest = left; rest && group.count < ROWS_TOGETHER; rest &= rest - 1) {
            const int i = __builtin_ctzll(rest);
            if (adapters[i] != group.adapter) continue;
            group.rows[group.count++] = int32_t(first + i);
            left &= ~(uint64_t(1) << i);
        }
    }
    return count;
}

// Writes RANKS_TOGETHER results for each of R rows: the rows' inputs times `in` `[RANKS_TOGETHER,
// ins]`.
template <int R, class T, class A>
inline void shrink_rows(const T *const *x, int64_t ins, const A *in, A *const *to) {
    constexpr int COUNT = ROWS_TOGETHER * RANKS_TOGETHER;
    static_assert(COUNT % LANES<A> == 0, "whole vectors of sums");
    V<A> each[COUNT];
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) each[i] = V<A>{};
    int64_t d = 0;
    for (; d + LANES<A> <= ins; d += LANES<A>) {
        V<A> inputs[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) inputs[r] = load(x[r] + d);
#pragma GCC unroll 4
        for (int j = 0; j < RANKS_TOGETHER; j++) {
            const V<A> weights = load(in + j * ins + d);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) each[r * RANKS_TOGETHER + j] += inputs[r] * weights;
        }
    }
    A totals[COUNT];
#pragma GCC unroll 4
    for (int i = 0; i < COUNT; i += LANES<A>) store(totals + i, sums(each + i));
    for (int r = 0; r < R; r++) {
        for (int j = 0; j < RANKS_TOGETHER; j++) {
            A total = totals[r * RANKS_TOGETHER + j];
            for (int64_t i = d; i < ins; i++) total += A(widened(x[r][i])) * in[j * ins + i];
            to[r][j] = total;
        }
    }
}

// The addition of adapters to the rows of a product, from row `first_row` on.
template <class A> struct LowRank {
    const Adapter *adapters;  // the adapters of the matrix, by slot; null: nothing is added
    const int32_t *slots;     // the slot of each row of the step; -1: no adapter
    const int64_t *slot_of;   // the row in the step of each row of the product; null: the same row
    A *inner;
    int64_t inner_row;
    const int64_t *inner_of;  // the row of `inner` for each row of the product; null: the same row
    int64_t first_row, first_panel;

    LowRank from(int64_t row) const {
        LowRank moved = *this;
        moved.first_row += row;
        return moved;
    }
    const Adapter *adapter_of(int64_t row) const { return adapter_of(row, adapters); }
    // Returns the row's adapter for the matrix with the adapters `of_matrix`.
    const Adapter *adapter_of(int64_t row, const Adapter *of_matrix) const {
        row += first_row;
        const int32_t slot = slots[slot_of ? slot_of[row] : row];
        return slot < 0 || !of_matrix[slot].rank ? nullptr : of_matrix + slot;
    }

    int64_t shrink_tasks(int64_t rows) const {
        return quotient_up(rows, ROWS_OF_SHRINK) * quotient_up(inner_row, RANKS_OF_SHRINK);
    }
    // Computes one task of the phase `shrink`: some rows of `x`, and some ranks of their adapters.
    template <class T, class AdapterOf>
    void shrink(int64_t task, const T *x, int64_t x_row, int64_t rows, int64_t ins,
                AdapterOf adapter_of) const {
        const int64_t slabs = quotient_up(inner_row, RANKS_OF_SHRINK);
        const int64_t first = task / slabs * ROWS_OF_SHRINK, rank = task % slabs * RANKS_OF_SHRINK;
        Alike groups[ROWS_OF_SHRINK];
        const int64_t count =
            group_rows(first, at_most(rows - first, ROWS_OF_SHRINK), adapter_of, groups);
        for (int64_t i = 0; i < count; i++) {
            const Alike &group = groups[i];
            const int64_t end = at_most(group.adapter->rank, rank + RANKS_OF_SHRINK);
            for (int64_t k = rank; k < end; k += RANKS_TOGETHER) {
                const T *from[ROWS_TOGETHER];
                A *to[ROWS_TOGETHER];
                for (int r = 0; r < group.count; r++) {
                    from[r] = x + group.rows[r] * x_row;
                    to[r] = inner + group.rows[r] * inner_row + k;
                }
                const A *in = (const A *)group.adapter->in + k * ins;
                if (group.count == 1) shrink_rows<1>(from, ins, in, to);
                if (group.count == 2) shrink_rows<2>(from, ins, in, to);
                if constexpr (ROWS_TOGETHER == 4) {
                    if (group.count == 3) shrink_rows<3>(from, ins, in, to);
                    if (group.count == 4) shrink_rows<4>(from, ins, in, to);
                }
            }
        }
    }

    // Adds the adapter to `count` panels, from `panel` on, of the results `tile`, whose first row
    // is row `first`.
    inline void add(const Alike &group, int64_t first, int64_t panel, int64_t count, A *tile,
                    int64_t tile_row) const {
        for (int64_t i = 0; i < count; i++, tile += PANEL<A>) {
            if (group.count == 1) add_to<1>(group, first, panel + i, tile, tile_row);
            if (group.count == 2) add_to<2>(group, first, panel + i, tile, tile_row);
            if constexpr (ROWS_TOGETHER == 4) {
                if (group.count == 3) add_to<3>(group, first, panel + i, tile, tile_row);
                if (group.count == 4) add_to<4>(group, first, panel + i, tile, tile_row);
            }
        }
    }
    template <int R>
    inline void add_to(const Alike &group, int64_t first, int64_t panel, A *tile,
                       int64_t tile_row) const {
        const Adapter &adapter = *group.adapter;
        panel += first_panel;
        const int64_t begin = adapter.spans[2 * panel], end = adapter.spans[2 * panel + 1];
        const A *out = (const A *)adapter.out + (panel * adapter.rank + begin) * PANEL<A>;
        const A *of_rank[R];
        V<A> left[R], right[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const int64_t row = group.rows[r] + first_row;
            of_rank[r] = inner + (inner_of ? inner_of[row] : row) * inner_row;
            const A *values = tile + (group.rows[r] - first) * tile_row;
            left[r] = load(values);
            right[r] = load(values + LANES<A>);
        }
        for (int64_t k = begin; k < end; k++, out += PANEL<A>) {
            const V<A> more = load(out), rest = load(out + LANES<A>);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const V<A> here = all_of(of_rank[r][k]);
                left[r] += here * more;
                right[r] += here * rest;
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            A *values = tile + (group.rows[r] - first) * tile_row;
            store(values, left[r]);
            store(values + LANES<A>, right[r]);
        }
    }
};

}  // namespace
