// SPDX-License-Identifier: Apache-2.0
// The addition of an adapter to a product, `(x @ in.T) @ out.T`, for the rows that have one.
//
//     shrink    rows: `inner` `[rows, rank]` = x @ in.T
//     add       panels: a panel's results += inner @ out.T, before bias and activation
//
// Rows of several adapters, and rows without one, go through one product together.
#pragma once

#include "step.h"
#include "vectors.h"

namespace {

constexpr int64_t RANKS_TOGETHER = 4;  // the rank of an adapter is a multiple of this

// `to` `[rank]` = a row of inputs times `in`.
template <class T, class A> inline void shrink_row(const T *x, int64_t ins, const Adapter &adapter, A *to) {
    const A *in = (const A *)adapter.in;
    for (int64_t k = 0; k < adapter.rank; k += RANKS_TOGETHER) {
        const A *const from = in + k * ins;
        V<A> sums[RANKS_TOGETHER] = {V<A>{}, V<A>{}, V<A>{}, V<A>{}};
        int64_t d = 0;
        for (; d + LANES<A> <= ins; d += LANES<A>) {
            const V<A> here = load(x + d);
#pragma GCC unroll 4
            for (int j = 0; j < RANKS_TOGETHER; j++) sums[j] += here * load(from + j * ins + d);
        }
        for (int j = 0; j < RANKS_TOGETHER; j++) {
            A total = sum<A>(sums[j]);
            for (int64_t i = d; i < ins; i++) total += A(widened(x[i])) * from[j * ins + i];
            to[k + j] = total;
        }
    }
}

// The addition to the rows of a product, or of its rows from one on.
template <class A> struct LowRank {
    const Adapter *adapters;  // of the matrix, by slot; null: nothing is added
    const int32_t *slots;     // of the step's rows; -1: none
    const int64_t *slot_of;   // the step's row of each row of the product; null: the same
    const A *inner;
    int64_t inner_row;
    const int64_t *inner_of;  // the row of `inner` of each row of the product; null: the same
    int64_t first_row, first_panel;

    LowRank from(int64_t row) const {
        LowRank moved = *this;
        moved.first_row += row;
        return moved;
    }
    const Adapter *adapter_of(int64_t row) const {
        const int32_t slot = slots[slot_of ? slot_of[row] : row];
        return slot < 0 || !adapters[slot].rank ? nullptr : adapters + slot;
    }
    // Adds to the panel `values` of a row.
    inline void add(int64_t row, int64_t panel, A *values) const {
        row += first_row;
        panel += first_panel;
        const Adapter *adapter = adapter_of(row);
        if (!adapter) return;
        const int64_t begin = adapter->spans[2 * panel], end = adapter->spans[2 * panel + 1];
        const A *of_rank = inner + (inner_of ? inner_of[row] : row) * inner_row;
        const A *out = (const A *)adapter->out + (panel * adapter->rank + begin) * PANEL<A>;
        V<A> left = load(values), right = load(values + LANES<A>);
        for (int64_t k = begin; k < end; k++, out += PANEL<A>) {
            const V<A> here = all_of(of_rank[k]);
            left += here * load(out);
            right += here * load(out + LANES<A>);
        }
        store(values, left);
        store(values + LANES<A>, right);
    }
};

}  // namespace
