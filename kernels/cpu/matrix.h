// SPDX-License-Identifier: Apache-2.0
// Products with matrices that are packed once, in the order in which products read them.
//
//     packed   [panels, ins, PANEL]: a panel is two vectors of outputs; the last is padded with 0
//     pair     alternating panels of two matrices of one size, for `activation(gate) * up`
//
// Every element of a result is the sum over the inputs in their order, so the bits of a row depend
// neither on other rows nor on the number of threads. Inputs have the type of the sums, float32 for
// 16-bit weights.
//
// In the variant with products of bfloat16, inputs of bfloat16 weights are rounded to bfloat16, and
// one instruction adds the products of two inputs:
//
//     packed   [panels, ins / 2, PANEL, 2], an odd number of inputs padded with 0
#pragma once

#include "low_rank.h"
#include "step.h"
#include "vectors.h"

namespace {

constexpr int MOST_ROWS = VECTOR_BYTES == 64 ? 14 : 6;  // rows in a block of accumulators
constexpr int MOST_PANELS = 4;
// The most rows of a task, which share the loads of the matrix; rows of usual sizes stay in the
// cache.
constexpr int64_t ROWS_AT_ONCE = 7 * MOST_ROWS;
// The size of a part of the matrix, in tasks of many rows.
constexpr int64_t PART_BYTES = 256 << 10;
// The distance of prefetches in a matrix that few rows are multiplied by.
constexpr int64_t AHEAD_BYTES = 16 << 10;
// From so many rows on, a panel of 16-bit weights is converted once, not for every block of rows.
constexpr int64_t WORTH_WIDENING = 3 * MOST_ROWS / 2;

// How many inputs of type T one instruction multiplies and adds, and the instruction.
template <class T> struct Inputs {
    static constexpr int64_t TOGETHER = 1;
    static V<T> everywhere(const T *from) { return all_of(*from); }
    template <class E> static V<T> weights(const E *from) { return load(from); }
    static V<T> add(V<T> to, V<T> input, V<T> weights) { return to + input * weights; }
};
// The type of the inputs for weights of type E.
template <class E> struct InputOf {
    typedef typename Wide<E>::A T;
};
#if defined(__AVX512BF16__)
template <> struct Inputs<BFloat16> {
    static constexpr int64_t TOGETHER = 2;
    static FloatVector everywhere(const BFloat16 *from) {
        return (FloatVector)(IntVector{} + read_as<int32_t>(from));
    }
    static FloatVector weights(const BFloat16 *from) { return read_as<FloatVector>(from); }
    static FloatVector add(FloatVector to, FloatVector inputs, FloatVector weights) {
        return (FloatVector)_mm512_dpbf16_ps((__m512)to, (__m512bh)inputs, (__m512bh)weights);
    }
};
template <> struct InputOf<BFloat16> {
    typedef BFloat16 T;
};
#endif

template <class T> inline int64_t padded(int64_t ins) {
    return quotient_up(ins, Inputs<T>::TOGETHER) * Inputs<T>::TOGETHER;
}
// Returns the distance between rows of inputs: an odd number of cache lines, so that loads of
// several rows are in different sets of the cache.
template <class T> inline int64_t row_of(int64_t ins) {
    return (quotient_up(ins * int64_t(sizeof(T)), 64) | 1) * 64 / int64_t(sizeof(T));
}
template <class T> inline void pad(T *row, int64_t ins) {
    for (int64_t k = ins; k < padded<T>(ins); k++) row[k] = T{};
}

template <class E, class A> inline void widen(const E *from, int64_t count, A *to) {
    int64_t d = 0;
    for (; d + LANES<A> <= count; d += LANES<A>) store(to + d, load(from + d));
    for (; d < count; d++) to[d] = widened(from[d]);
}

// Converts a row of elements of type E to a row of inputs of type T.
template <class E, class T> inline void take_inputs(const E *from, int64_t count, T *to) {
    if constexpr (sizeof(E) == sizeof(T))
        __builtin_memcpy(to, from, size_t(count) * sizeof(E));
    else
        widen(from, count, to);
    pad(to, count);
}

template <class A> inline int64_t panels_of(const Matrix &matrix) {
    return quotient_up(matrix.outs, PANEL<A>) * (matrix.is_pair ? 2 : 1);
}

// The memory that is read next: each step of a product prefetches one cache line.
struct NextLines {
    const char *at;
    int64_t each;  // bytes from one line to the next
};

// `tile` `[MR, NP panels]` = a `[MR, depth]` times NP panels; `depth` is padded.
template <int MR, int NP, class B, class T, class A>
inline void multiply_panels(const T *a, int64_t a_row, const B *b, int64_t b_panel, int64_t depth,
                            A *tile, int64_t tile_row, NextLines next = {nullptr, 0}) {
    constexpr int64_t STEP = Inputs<T>::TOGETHER;
    V<A> acc[MR][2 * NP];
#pragma GCC unroll 14
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * NP; j++) acc[m][j] = V<A>{};
    // Every third row has a pointer, from which the next two rows are addressed: a pointer for each
    // row, or a computed distance, would need more registers than there are.
    constexpr int POINTERS = (MR + 2) / 3;
    const T *rows[POINTERS];
#pragma GCC unroll 5
    for (int i = 0; i < POINTERS; i++) rows[i] = a + 3 * i * a_row;
    for (const B *end = b + depth * PANEL<A>; b < end; b += STEP * PANEL<A>) {
        V<A> right[2 * NP];
        if constexpr (MR > 3) {  // with fewer rows, the speed is that of the memory
            __builtin_prefetch(next.at, 0, 2);
            next.at += next.each;
        }
#pragma GCC unroll 4
        for (int p = 0; p < NP; p++) {
            right[2 * p] = Inputs<T>::weights(b + p * b_panel);
            right[2 * p + 1] = Inputs<T>::weights(b + p * b_panel + STEP * LANES<A>);
        }
#pragma GCC unroll 5
        for (int i = 0; i < POINTERS; i++) asm("" : "+r"(rows[i]));
#pragma GCC unroll 14
        for (int m = 0; m < MR; m++) {
            const V<A> left = Inputs<T>::everywhere(rows[m / 3] + m % 3 * a_row);
#pragma GCC unroll 8
            for (int j = 0; j < 2 * NP; j++) acc[m][j] = Inputs<T>::add(acc[m][j], left, right[j]);
        }
#pragma GCC unroll 5
        for (int i = 0; i < POINTERS; i++) rows[i] += STEP;
    }
#pragma GCC unroll 14
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 8
        for (int j = 0; j < 2 * NP; j++) store(tile + m * tile_row + j * LANES<A>, acc[m][j]);
}

template <int MR, class B, class T, class A>
inline void multiply_rows(int64_t rows, const T *a, int64_t a_row, const B *b, int64_t depth,
                          A *tile, int64_t tile_row, NextLines next) {
    if constexpr (MR == 1) {
        multiply_panels<1, 1>(a, a_row, b, 0, depth, tile, tile_row, next);
    } else {
        if (rows == MR)
            multiply_panels<MR, 1>(a, a_row, b, 0, depth, tile, tile_row, next);
        else
            multiply_rows<MR - 1>(rows, a, a_row, b, depth, tile, tile_row, next);
    }
}

// Multiplies `a` `[rows, ins]` by the panels from `first` to `end`; a pair has only whole pairs of
// panels. `put(row, panel, values)` stores one panel of a row's results, or the two of a pair.
// `put.send_for` prefetches the target of the results, and `put.end(panel)` is called after the
// last row. `widened` is memory for `[ins, PANEL]` twice. The adapters' results are added before
// `put`.
template <class E, class T, class A, class Put>
void multiply_packed(const T *a, int64_t a_row, int64_t rows, const Matrix &matrix, int64_t first,
                     int64_t end, A *widened, Put put, const LowRank<A> &low) {
    const int64_t depth = padded<T>(matrix.ins), size = depth * PANEL<A>;
    const int unit = matrix.is_pair ? 2 : 1;
    const E *packed = (const E *)matrix.packed;
    A tile[MOST_ROWS * MOST_PANELS * PANEL<A>];
    int64_t p = first;
    Alike groups[ROWS_AT_ONCE];  // the groups of all blocks of rows
    int64_t ends[ROWS_AT_ONCE / MOST_ROWS + 1] = {};
    const int64_t blocks = quotient_up(rows, MOST_ROWS), row_size = unit * PANEL<A>;
    const auto row_after = [&](int64_t block, int64_t row) {
        return row + (rows - row) / (blocks - block);  // blocks differ by at most one row
    };
    if (low.adapters)
        for (int64_t block = 0, row = 0, count = 0; block < blocks; block++) {
            const int64_t end_row = row_after(block, row);
            count += group_rows(row, end_row - row, [&](int64_t i) { return low.adapter_of(i); },
                                groups + count);
            ends[block + 1] = count;
            row = end_row;
        }
    const auto add_low = [&](int64_t block, int64_t row, int64_t panel, int64_t count, A *values,
                             int64_t values_row) {
        for (int64_t i = ends[block]; i < ends[block + 1]; i++)
            low.add(groups[i], row, panel, count, values, values_row);
    };
#define FEW(ROWS, NP)                                                                           \
    for (; rows == ROWS && p + NP <= end; p += NP) {                                            \
        multiply_panels<ROWS, NP>(a, a_row, packed + p * size, size, depth, tile,               \
                                  int64_t(NP * PANEL<A>));                                      \
        add_low(0, 0, p, NP, tile, NP * PANEL<A>);                                              \
        for (int64_t i = 0; i < NP; i += unit) {                                                \
            for (int64_t m = 0; m < ROWS; m++)                                                  \
                put(m, p + i, tile + (m * NP + i) * PANEL<A>);                                  \
            put.end(p + i);                                                                     \
        }                                                                                       \
    }
    FEW(1, 4)
    FEW(1, 2)
    FEW(2, 2)
    FEW(3, 2)
#undef FEW
    for (; p < end; p += unit) {
        const E *from = packed + p * size;
        const auto multiply_by = [&](const auto *panels) {
            for (int64_t block = 0, row = 0; block < blocks; block++) {
                const int64_t here = row_after(block, row) - row;
                for (int64_t m = 0; m < here; m++) put.send_for(row + m, p);
                for (int64_t u = 0; u < unit; u++) {
                    // The first two blocks of rows prefetch half of the next panel each. With a
                    // single block, each cache line is prefetched AHEAD_BYTES before its use.
                    constexpr int64_t STEP_BYTES =
                        Inputs<T>::TOGETHER * PANEL<A> * int64_t(sizeof(E));
                    NextLines next = {(const char *)(from + u * size) + AHEAD_BYTES, STEP_BYTES};
                    if (block < 2 && blocks > 1 && p + unit < end)
                        next = {(const char *)(from + (unit + u) * size + block * size / 2),
                                Inputs<T>::TOGETHER * PANEL<A> * int64_t(sizeof(E)) / 2};
                    multiply_rows<MOST_ROWS>(here, a + row * a_row, a_row, panels + u * size, depth,
                                             tile + u * PANEL<A>, row_size, next);
                }
                add_low(block, row, p, unit, tile, row_size);
                for (int64_t m = 0; m < here; m++) put(row + m, p, tile + m * row_size);
                row += here;
            }
            put.end(p);
        };
        if constexpr (sizeof(E) < sizeof(T)) {
            if (rows >= WORTH_WIDENING) {
                for (int64_t i = 0; i < unit * size; i += LANES<A>)
                    store(widened + i, load(from + i));
                multiply_by(widened);
                continue;
            }
        }
        multiply_by(from);
    }
}

// Targets of a product's results (Stored, Widened, Added, Gated), each for some rows, of which the
// first is row 0. `send_for_panel` prefetches the cache lines to which a panel of results is
// written. The function must be inlined, because GCC omits calls of a function that only
// prefetches.
#define ALWAYS_INLINE inline __attribute__((always_inline))
template <class A, class O> ALWAYS_INLINE void send_for_panel(const O *to) {
#pragma GCC unroll 2
    for (int64_t i = 0; i < PANEL<A>; i += 64 / int64_t(sizeof(O)))
        __builtin_prefetch(to + i, 1, 3);
}
template <class A> inline int64_t columns_here(const Matrix &matrix, int64_t column) {
    return matrix.outs - column < PANEL<A> ? matrix.outs - column : PANEL<A>;
}
template <class A> inline V<A> biased(const Matrix &matrix, int64_t panel, int64_t at, V<A> value) {
    if (!matrix.bias) return value;
    return value + load((const A *)matrix.bias + panel * PANEL<A> + at);
}

template <class A>
inline void add_bias(const Matrix &matrix, int64_t panel, const A *values, A *sums) {
    for (int64_t i = 0; i < PANEL<A>; i += LANES<A>)
        store(sums + i, biased<A>(matrix, panel, i, load(values + i)));
}

template <class O, class A> inline void put_panel(const A *sums, int64_t count, O *to) {
    if (count == PANEL<A>) {
        narrow_vector(load(sums), to);
        narrow_vector(load(sums + LANES<A>), to + LANES<A>);
    } else {
        for (int64_t i = 0; i < count; i++) narrow(sums[i], to + i);
    }
}

template <class O, class A> struct Stored {
    const Matrix &matrix;
    O *out;
    int64_t out_row;
    inline void operator()(int64_t row, int64_t panel, const A *values) const {
        const int64_t column = panel * PANEL<A>, count = columns_here<A>(matrix, column);
        A sums[PANEL<A>];
        add_bias(matrix, panel, values, sums);
        put_panel(sums, count, out + row * out_row + column);
    }
    ALWAYS_INLINE void send_for(int64_t row, int64_t panel) const {
        send_for_panel<A>(out + row * out_row + panel * PANEL<A>);
    }
    void end(int64_t) const {}
};

// Stores results that are rounded to elements and converted back.
template <class E, class A> struct Widened {
    const Matrix &matrix;
    A *out;
    int64_t out_row;
    inline void operator()(int64_t row, int64_t panel, const A *values) const {
        A sums[PANEL<A>];
        E elements[PANEL<A>];
        add_bias(matrix, panel, values, sums);
        put_panel(sums, int64_t(PANEL<A>), elements);
        const int64_t column = panel * PANEL<A>, count = columns_here<A>(matrix, column);
        A *to = out + row * out_row + column;
        if (count == PANEL<A>)
            for (int64_t i = 0; i < PANEL<A>; i += LANES<A>) store(to + i, load(elements + i));
        else
            for (int64_t i = 0; i < count; i++) to[i] = widened(elements[i]);
    }
    void send_for(int64_t, int64_t) const {}
    void end(int64_t) const {}
};

// Adds results to the values in `out`.
template <class A> struct Added {
    const Matrix &matrix;
    A *out;
    int64_t out_row;
    inline void operator()(int64_t row, int64_t panel, const A *values) const {
        const int64_t column = panel * PANEL<A>, count = columns_here<A>(matrix, column);
        A *to = out + row * out_row + column;
        if (count == PANEL<A>) {
            for (int64_t i = 0; i < PANEL<A>; i += LANES<A>)
                store(to + i, load(to + i) + biased<A>(matrix, panel, i, load(values + i)));
            return;
        }
        for (int64_t i = 0; i < count; i++) {
            const A bias = matrix.bias ? ((const A *)matrix.bias)[column + i] : A(0);
            to[i] += values[i] + bias;
        }
    }
    ALWAYS_INLINE void send_for(int64_t row, int64_t panel) const {
        send_for_panel<A>(out + row * out_row + panel * PANEL<A>);
    }
    void end(int64_t) const {}
};

inline FloatVector silu(FloatVector x) {
    const FloatVector turned = x < -88.0f ? all_of(88.0f) : -x;
    return x / (1.0f + exponential(turned));
}
inline DoubleVector silu(DoubleVector x) { return x / (1.0 + exponential(-x)); }
template <class A> inline V<A> gelu(V<A> x) {
    const V<A> inner = A(0.79788456080286535588) * (x + A(0.044715) * x * x * x);
    return A(0.5) * x * (A(1) + tangent(inner));
}

#if VECTOR_BYTES == 64
// SiLU for 16-bit results, with a relative error of at most 3e-6.
inline FloatVector rough_silu(FloatVector x) {
    const __m512 t = _mm512_max_ps((__m512)(x * -1.44269504f), _mm512_set1_ps(-200.0f));
    const __m512 whole = _mm512_roundscale_ps(t, 0);
    const FloatVector r = (FloatVector)t - (FloatVector)whole;
    // Of the polynomials of this degree that are 1 at 0, the one with the smallest error for r from
    // -1/2 to 1/2.
    FloatVector p = all_of(0.00958286f);
    p = p * r + 0.05590643f;
    p = p * r + 0.24024099f;
    p = p * r + 0.69312419f;
    p = p * r + 1.0f;
    return x / (1.0f + (FloatVector)_mm512_scalef_ps((__m512)p, whole));
}
#endif
// SiLU with the precision of results of type O.
template <class O, class Vec> inline Vec silu_for(Vec x) {
#if VECTOR_BYTES == 64
    if constexpr (sizeof(O) == 2) return rough_silu(x);
#endif
    return silu(x);
}

// Stores `activation(gate) * up` from the results of a pair.
template <class O, class A> struct Gated {
    const Matrix &matrix;
    O *out;
    int64_t out_row;
    bool is_gelu;
    inline void operator()(int64_t row, int64_t panel, const A *values) const {
        const int64_t column = panel / 2 * PANEL<A>, count = columns_here<A>(matrix, column);
        A sums[PANEL<A>];
        for (int64_t i = 0; i < PANEL<A>; i += LANES<A>) {
            const V<A> gate = biased<A>(matrix, panel, i, load(values + i));
            const V<A> up = biased<A>(matrix, panel + 1, i, load(values + PANEL<A> + i));
            store(sums + i, (is_gelu ? gelu<A>(gate) : silu_for<O>(gate)) * up);
        }
        put_panel(sums, count, out + row * out_row + column);
    }
    ALWAYS_INLINE void send_for(int64_t row, int64_t panel) const {
        send_for_panel<A>(out + row * out_row + panel / 2 * PANEL<A>);
    }
    void end(int64_t) const {}
};

// The division of a product into tasks, by blocks of rows and parts of the matrix: enough tasks for
// all threads, and parts that stay in a cache while several blocks of rows are multiplied.
struct Cut {
    int64_t row_blocks, panel_blocks, panels_each;
};
// Returns the tasks of a product. The number of a task's panels is a multiple of `unit`, except for
// the last task. The threads compute `together` such products at the same time.
template <class E>
inline Cut cut(const Matrix &matrix, int64_t rows, int64_t threads, int64_t unit,
               int64_t together = 1) {
    typedef typename Wide<E>::A A;
    const int64_t panels = panels_of<A>(matrix);
    Cut made;
    made.row_blocks = quotient_up(rows, ROWS_AT_ONCE);  // 0 if there are no rows
    const int64_t wanted =
        threads == 1 || !rows ? 1 : quotient_up(4 * threads, made.row_blocks * together);
    // Few rows are multiplied by four panels at a time.
    const int64_t step = rows < 4 ? round_up(MOST_PANELS, unit) : unit;
    int64_t each = quotient_up(panels, wanted);
    if (made.row_blocks > 1) {
        const int64_t depth = at_least(padded<typename InputOf<E>::T>(matrix.ins), 1);
        each = at_most(each, at_least(PART_BYTES / (depth * PANEL<A> * int64_t(sizeof(E))), 1));
    }
    made.panels_each = quotient_up(each, step) * step;
    made.panel_blocks = quotient_up(panels, made.panels_each);
    return made;
}
template <class E> inline Cut cut(const Matrix &matrix, int64_t rows, int64_t threads) {
    return cut<E>(matrix, rows, threads, matrix.is_pair ? 2 : 1);
}

// The panels of a matrix that are computed: panels with a wanted output, or all panels if `bits` is
// null.
template <class A> struct Wanted {
    const uint32_t *bits;
    int64_t words;

    bool operator()(int64_t panel) const {
        static_assert(PANEL<A> <= 32, "a panel lies in one word");
        if (!bits) return true;
        const int64_t first = panel * PANEL<A>;
        return first / 32 < words &&
               (bits[first / 32] >> first % 32 & (~uint32_t(0) >> (32 - PANEL<A>)));
    }
    int64_t of(int64_t panels) const {
        if (!bits) return panels;
        int64_t count = 0;
        for (int64_t panel = 0; panel < panels; panel++) count += (*this)(panel);
        return count;
    }
};

// Computes one task; `put_for(first row, end row)` returns the target of the task's results.
template <class E, class T, class A, class PutFor>
inline void multiply_task(const Cut &made, int64_t task, const T *a, int64_t a_row, int64_t rows,
                          const Matrix &matrix, A *widened, PutFor put_for,
                          Wanted<A> wanted = {nullptr, 0}, const LowRank<A> &low = {}) {
    const int64_t panels = panels_of<A>(matrix);
    const int64_t block = task % made.row_blocks, part = task / made.row_blocks;
    // Blocks differ by at most one row.
    const int64_t first_row = rows * block / made.row_blocks;
    const int64_t end_row = rows * (block + 1) / made.row_blocks;
    const int64_t first = part * made.panels_each;
    const int64_t end = first + made.panels_each < panels ? first + made.panels_each : panels;
    const auto put = put_for(first_row, end_row);
    for (int64_t from = first, to; from < end; from = to + 1) {
        for (to = from; to < end && wanted(to); to++) {}
        if (to > from)
            multiply_packed<E>(a + first_row * a_row, a_row, end_row - first_row, matrix, from, to,
                               widened, put, low.from(first_row));
    }
}

// Packs a matrix `[outs, ins]` into panels; for a pair, into every second panel from `offset` on.
template <class T, class A, class E>
void pack_into(const E *weight, int64_t row, const Matrix &matrix, int64_t offset, E *packed) {
    constexpr int64_t STEP = Inputs<T>::TOGETHER;
    const int64_t depth = padded<T>(matrix.ins);
    const int64_t unit = matrix.is_pair ? 2 : 1, size = depth * PANEL<A>;
    for (int64_t column = 0; column < matrix.outs; column += PANEL<A>) {
        E *panel = packed + (column / PANEL<A> * unit + offset) * size;
        const int64_t count = columns_here<A>(matrix, column);
        // In blocks whose source and target stay in the cache.
        for (int64_t begin = 0; begin < depth; begin += 64) {
            const int64_t end = begin + 64 < depth ? begin + 64 : depth;
            for (int64_t i = 0; i < PANEL<A>; i++) {
                const E *from = weight + (column + i) * row;
                for (int64_t k = begin; k < end; k++)
                    panel[k / STEP * STEP * PANEL<A> + i * STEP + k % STEP] =
                        i < count && k < matrix.ins ? from[k] : E{};
            }
        }
    }
}

}  // namespace
