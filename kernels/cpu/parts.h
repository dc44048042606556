// SPDX-License-Identifier: Apache-2.0
// Attention of few rows over a part of their context, for all heads, and the combination of a
// request's parts.
#pragma once

#include "layout.h"

namespace {

// Prefetches to the second-level cache, because the first level is too small and handles few misses
// at a time.
inline void prefetch(const void *from, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + b, 0, 2);
}

// Rows of keys or values that will be prefetched, in the order of memory: all heads of a token,
// then the next token. Attention reads a group of tokens once for each head; prefetches in that
// order would read memory in strides, at nine tenths of the speed.
template <class E> struct Ahead {
    const E *const *rows;
    int64_t heads, head_stride;
    int64_t head;

    inline const E *next() {
        const E *found = *rows + head * head_stride;
        if (++head == heads) {
            head = 0;
            rows++;
        }
        return found;
    }
};

// Writes the scores of MQ queries for the next LANES keys to rows of SPLIT scores. With `fetches`,
// prefetches LANES rows.
template <class F, int MQ, class E, class A>
inline void score_keys(const E *const *keys, int64_t offset, const typename F::Number *q,
                       int64_t depth, bool fetches, Ahead<E> &ahead, A *scores) {
    constexpr int NT = LANES<A> / MQ;
    for (int64_t t = 0; t < LANES<A>; t += NT) {
        const E *from[NT];
#pragma GCC unroll 16
        for (int i = 0; i < NT; i++) {
            from[i] = keys[t + i] + offset;
            if (fetches) prefetch(ahead.next(), depth * F::DEPTH * int64_t(sizeof(E)));
        }
        V<A> acc[LANES<A>];  // GCC would compile `= {}` to a loop over memory
#pragma GCC unroll 16
        for (int i = 0; i < LANES<A>; i++) acc[i] = V<A>{};
        for (int64_t d = 0; d < depth; d += LANES<A>) {
            typename F::Vector query[MQ];
#pragma GCC unroll 4
            for (int m = 0; m < MQ; m++) query[m] = F::read(q + m * depth + d);
#pragma GCC unroll 16
            for (int i = 0; i < NT; i++) {
                const typename F::Vector key = F::of_elements(from[i] + d * F::DEPTH);
#pragma GCC unroll 4
                for (int m = 0; m < MQ; m++)
                    acc[m * NT + i] = F::added(acc[m * NT + i], query[m], key);
            }
        }
        V<A> all = sums(acc);
#pragma GCC unroll 4
        for (int m = 0; m < MQ; m++)
            __builtin_memcpy(scores + m * SPLIT + t, (const A *)&all + m * NT, NT * sizeof(A));
    }
}

// Adds the next `count` values, times their weights, to MQ results of DV vectors. With FETCHES,
// prefetches `count` rows from `column` on.
template <int MQ, int DV, bool FETCHES, class E, class A>
inline void weigh_values(const E *const *values, int64_t offset, int64_t count, const A *weights,
                         int64_t dim, Ahead<E> &ahead, int64_t column, A *out) {
    V<A> acc[MQ][DV];
#pragma GCC unroll 4
    for (int m = 0; m < MQ; m++)
#pragma GCC unroll 8
        for (int j = 0; j < DV; j++) acc[m][j] = load(out + m * dim + j * LANES<A>);
    for (int64_t t = 0; t < count; t++) {
        const E *from = values[t] + offset;
        if (FETCHES) prefetch(ahead.next() + column, DV * LANES<A> * int64_t(sizeof(E)));
        V<A> weight[MQ];
#pragma GCC unroll 4
        for (int m = 0; m < MQ; m++) weight[m] = all_of(weights[m * SPLIT + t]);
#pragma GCC unroll 8
        for (int j = 0; j < DV; j++) {
            V<A> value = load(from + j * LANES<A>);
#pragma GCC unroll 4
            for (int m = 0; m < MQ; m++) acc[m][j] += weight[m] * value;
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < MQ; m++)
#pragma GCC unroll 8
        for (int j = 0; j < DV; j++) store(out + m * dim + j * LANES<A>, acc[m][j]);
}

#ifdef __AVX512BF16__
// The same for pairs of tokens, interleaved in each 16 bytes: 32 results are in two vectors, in an
// order that `in_order` corrects at the end.
template <int MQ, int DV, bool FETCHES>
inline void weigh_values(const BFloat16 *const *values, int64_t offset, int64_t count,
                         const Pair *weights, int64_t dim, Ahead<BFloat16> &ahead, int64_t column,
                         float *out) {
    constexpr int LANES_OF_A_TOKEN = 2 * LANES<float>;
    FloatVector acc[MQ][DV];
#pragma GCC unroll 4
    for (int m = 0; m < MQ; m++)
#pragma GCC unroll 8
        for (int j = 0; j < DV; j++) acc[m][j] = load(out + m * dim + j * LANES<float>);
    for (int64_t t = 0; t < count; t += 2) {
        const BFloat16 *first = values[t] + offset, *second = values[t + 1] + offset;
        if (FETCHES)
            for (int i = 0; i < 2; i++)
                prefetch(ahead.next() + column, DV * LANES<float> * int64_t(sizeof(BFloat16)));
        IntVector weight[MQ];
#pragma GCC unroll 4
        for (int m = 0; m < MQ; m++) weight[m] = Pairs::everywhere(weights[m * SPLIT + t / 2]);
#pragma GCC unroll 4
        for (int j = 0; j < DV; j += 2) {
            const __m512i a = (__m512i)Pairs::of_elements(first + j / 2 * LANES_OF_A_TOKEN);
            __m512i b = (__m512i)Pairs::of_elements(second + j / 2 * LANES_OF_A_TOKEN);
            if (t + 1 == count) b = __m512i{};
            const IntVector low = (IntVector)_mm512_unpacklo_epi16(a, b);
            const IntVector high = (IntVector)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
            for (int m = 0; m < MQ; m++) {
                acc[m][j] = Pairs::added(acc[m][j], weight[m], low);
                acc[m][j + 1] = Pairs::added(acc[m][j + 1], weight[m], high);
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < MQ; m++)
#pragma GCC unroll 8
        for (int j = 0; j < DV; j++) store(out + m * dim + j * LANES<float>, acc[m][j]);
}

// Sorts results `[count]` of pairs into the order of the head; results of numbers are already
// sorted.
inline void in_order(Pairs, float *out, int64_t count) {
    typedef IntVector I;
    for (int64_t d = 0; d < count; d += PANEL<float>) {
        const FloatVector low = load(out + d), high = load(out + d + LANES<float>);
        store(out + d, TWO(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
        store(out + d + LANES<float>,
              TWO(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
    }
}
#endif
template <class A> inline void in_order(Numbers<A>, A *, int64_t) {}

template <class F, int MQ, bool FETCHES, class E, class A>
inline void weigh_heads(const E *const *values, int64_t offset, int64_t count,
                        const typename F::Number *weights, int64_t dim, Ahead<E> &ahead, A *out) {
    const Ahead<E> begun = ahead;
    constexpr int MOST = (VECTOR_BYTES == 64 ? 16 : 8) / MQ;
    int64_t d = 0;
#define WEIGH(DV)                                                                              \
    if constexpr (MOST >= DV && DV >= F::DEPTH)                                                \
        for (; d + DV * LANES<A> <= dim; d += DV * LANES<A>) {                                 \
            ahead = begun;                                                                     \
            weigh_values<MQ, DV, FETCHES>(values, offset + d, count, weights, dim, ahead, d,   \
                                          out + d);                                            \
        }
    WEIGH(8)
    WEIGH(4)
    WEIGH(2)
    WEIGH(1)
#undef WEIGH
}

// Scores of all queries of a group; only the first queries prefetch.
template <class F, class E, class A>
inline void score_group(const E *const *keys, int64_t offset, const typename F::Number *q,
                        int64_t vectors, int64_t depth, Ahead<E> &ahead, A *scores) {
    int64_t m = 0;
#define SCORE(MQ)                                                                        \
    for (; m + MQ <= vectors; m += MQ)                                                   \
        score_keys<F, MQ>(keys, offset, q + m * depth, depth, m == 0, ahead, scores + m * SPLIT);
    SCORE(4)
    SCORE(2)
    SCORE(1)
#undef SCORE
}

template <class F, class E, class A>
inline void weigh_group(const E *const *values, int64_t offset, int64_t count,
                        const typename F::Number *weights, int64_t vectors, int64_t dim,
                        Ahead<E> &ahead, A *out) {
    int64_t m = 0;
#define WEIGH(MQ)                                                                             \
    for (; m + MQ <= vectors; m += MQ)                                                        \
        if (m == 0)                                                                           \
            weigh_heads<F, MQ, true>(values, offset, count, weights, dim, ahead, out);        \
        else                                                                                  \
            weigh_heads<F, MQ, false>(values, offset, count, weights + m * SPLIT, dim, ahead, \
                                      out + m * dim);
    WEIGH(4)
    WEIGH(2)
    WEIGH(1)
#undef WEIGH
}

// Combines the parts of a request to its result; `partials` has the parts in their order.
template <class E>
void join_parts(const Step &step, const Request &request, int64_t parts,
                typename Wide<E>::A *partials) {
    typedef typename Wide<E>::A A;
    const int64_t dim = step.head_dim, vectors = request.rows * (step.heads / step.kv_heads);
    const int64_t count = step.kv_heads * vectors, size = count * (dim + 2);
    for (int64_t v = 0; v < count; v++) {
        A top = -__builtin_inf();
        for (int64_t p = 0; p < parts; p++)
            top = larger(top, partials[p * size + count * dim + v]);
        const A taken = top == -(A)__builtin_inf() ? A(0) : top;
        A total = 0;
        A *out = partials + v * dim;  // in the memory of the first part
        for (int64_t p = 0; p < parts; p++) {
            const A *part = partials + p * size;
            const A share = weight_of(all_of(part[count * dim + v] - taken))[0];
            total += share * part[count * dim + count + v];
            for (int64_t d = 0; d < dim; d += LANES<A>) {
                V<A> more = share * load(part + v * dim + d);
                store(out + d, p ? load(out + d) + more : more);
            }
        }
        give(out, total, dim, out_of<E>(step, request, v / vectors, v % vectors));
    }
}

// Copies a member's results, from vector `before` on in `[kv heads * vectors, dim]`, to `step.out`
// or to the partial results. Returns the member's number of vectors per kv head.
template <class E, class A>
int64_t give_part(const Step &step, const Layout &layout, const Member &member, int64_t vectors,
                  int64_t before, const A *out, const A *tops, const A *totals) {
    const int64_t group = step.heads / step.kv_heads, dim = step.head_dim;
    const Request request = request_of(step, member.request);
    const int64_t own = request.rows * group, count = step.kv_heads * own;
    const int64_t parts = layout.parts(member.request);
    if (parts == 1) {
        for (int64_t head = 0; head < step.kv_heads; head++)
            for (int64_t m = 0; m < own; m++) {
                const int64_t v = head * vectors + before + m;
                give(out + v * dim, totals[v], dim, out_of<E>(step, request, head, m));
            }
        return own;
    }
    A *partials = (A *)layout.partials + layout.first_partial[member.request];
    A *partial = partials + member.number * count * (dim + 2);
    for (int64_t head = 0; head < step.kv_heads; head++) {
        const int64_t from = head * vectors + before, to = head * own;
        if (out != partial)
            __builtin_memcpy(partial + to * dim, out + from * dim, size_t(own * dim) * sizeof(A));
        for (int64_t m = 0; m < own; m++) {
            partial[count * dim + to + m] = tops[from + m];
            partial[count * (dim + 1) + to + m] = totals[from + m];
        }
    }
    int32_t &remaining = layout.remaining[member.request];
    if (__atomic_sub_fetch(&remaining, 1, __ATOMIC_ACQ_REL) == 0) {
        join_parts<E>(step, request, parts, partials);
        remaining = int32_t(parts);  // for the next layer
    }
    return own;
}

// Computes attention over one part of a context, for all rows and heads of a task's requests.
// Writes results, largest scores and sums of weights to each request's partial results; the results
// of a request with one part go to `step.out`.
template <class E, class F>
void attend_part(const Step &step, const Layout &layout, const Task &task, char *scratch) {
    typedef typename Wide<E>::A A;
    typedef typename F::Number Number;
    const int64_t group = step.heads / step.kv_heads, dim = step.head_dim, depth = dim / F::DEPTH;
    const int64_t vectors = task.vectors / step.kv_heads, all = task.vectors;
    const Member &leader = layout.members[task.first];
    const bool is_shared = task.first != task.last;
    const int64_t index = leader.request;  // the request whose block ids are used
    const Request request = request_of(step, index);
    const int64_t part = first_part(step, request) + leader.number;
    const int64_t first = at_least(part * SPLIT, request.first_key(0, step.window));
    const int64_t count = at_least(at_most((part + 1) * SPLIT, request.length) - first, 0);
    const int64_t width = round_up(count, LANES<A>);

    const PartScratch<A> size = {all, dim};
    A *own = (A *)scratch;
    A *scores = own + size.of_rows();
    A *tops = scores + size.of_scores();
    A *totals = tops + size.of_sums();
    A *shares = totals + size.of_sums();
    Number *q = (Number *)(shares + size.of_sums());
    // Addresses of the rows of keys and of values; the last address repeats for prefetches beyond
    // the end.
    const E **keys = (const E **)(q + size.of_rows());
    const E **values = keys + width;
    A *out = is_shared || layout.parts(index) == 1
                 ? own
                 : (A *)layout.partials + layout.first_partial[index] +
                       leader.number * all * (dim + 2);

    // Queries are sorted by kv head, and under each kv head by request.
    int64_t before = 0;
    for (int64_t at = task.first; at >= 0; at = layout.members[at].next) {
        const Request of = request_of(step, layout.members[at].request);
        for (int64_t head = 0; head < step.kv_heads; head++)
            for (int64_t m = 0; m < of.rows * group; m++) {
                const E *from = (const E *)step.q + (of.first_row + m / group) * step.q_row +
                                (head * group + m % group) * step.q_head;
                F::keep_elements(from, dim, q + (head * vectors + before + m) * depth);
            }
        before += of.rows * group;
    }
    for (int64_t t = 0; t < count;) {
        const int64_t token = first + t, place = token % step.block_size;
        const int64_t here = at_most(step.block_size - place, count - t);
        const E *key = block_of<E>(step, step.keys, index, token) + place * step.token_stride;
        const E *value = block_of<E>(step, step.values, index, token) + place * step.token_stride;
        for (int64_t i = 0; i < here; i++, t++) {
            keys[t] = key + i * step.token_stride;
            values[t] = value + i * step.token_stride;
        }
    }
    for (int64_t t = count; t < width; t++) keys[t] = keys[count - 1];
    for (int64_t t = count; count && t < count + AHEAD; t++) values[t] = values[count - 1];

    for (int64_t t = 0; t < width; t += LANES<A>) {
        Ahead<E> ahead = {keys + t + AHEAD, step.kv_heads, step.head_stride, 0};
        for (int64_t head = 0; head < step.kv_heads; head++)
            score_group<F>(keys + t, head * step.head_stride, q + head * vectors * depth, vectors,
                           depth, ahead, scores + head * vectors * SPLIT + t);
    }
    for (int64_t v = 0; v < size.of_sums(); v++) {
        tops[v] = -__builtin_inf();
        totals[v] = 0;
    }
    const Softmax<A> softmax = {A(step.scale), A(step.softcap), tops, totals, shares};
    for (int64_t v = 0; v < all; v += LANES<A>)
        softmax.template weigh<F>(
            scores + v * SPLIT, SPLIT, v, at_most(LANES<A>, all - v), width,
            is_shared || (request.rows == 1 && count == width), [&](int64_t i) {
                const int64_t row = (v + i) % vectors / group;
                return Seen{at_least(request.first_key(row, step.window) - first, 0),
                            at_least(at_most(request.end_key(row) - first, count), 0)};
            });
    for (int64_t i = 0; i < all * dim; i += LANES<A>) store(out + i, V<A>{});
    const int64_t token_bytes = step.kv_heads * dim * int64_t(sizeof(E));
    const int64_t chunk = at_most(CHUNK, at_least(CHUNK_BYTES / token_bytes / 2 * 2, 4));
    for (int64_t t = 0; t < count; t += chunk) {
        Ahead<E> ahead = {values + t + AHEAD, step.kv_heads, step.head_stride, 0};
        for (int64_t head = 0; head < step.kv_heads; head++)
            weigh_group<F>(values + t, head * step.head_stride, at_most(chunk, count - t),
                           (const Number *)(scores + head * vectors * SPLIT) + t / F::DEPTH,
                           vectors, dim, ahead, out + head * vectors * dim);
    }
    in_order(F(), out, all * dim);
    before = 0;
    for (int64_t at = task.first; at >= 0; at = layout.members[at].next) {
        const Member &member = layout.members[at];
        before += give_part<E>(step, layout, member, vectors, before, out, tops, totals);
    }
}

}  // namespace
