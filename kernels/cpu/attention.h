// SPDX-License-Identifier: Apache-2.0
// Attention over the paged pool where it lies, for one kind of processor.
//
//     few rows   a task is a part of a request's context, all heads in it; the parts of a request
//                are put together by the thread that ends the last of them
//     more       a task is some rows of a request under one kv head, over the keys they see
//
// Parts begin at the same positions whatever else is computed, and are put together in their
// order, so a request's numbers depend neither on the other requests nor on the number of threads.
// Numbers are added up in the type of the pool, 16-bit ones in float32.
#pragma once

#include "tiles.h"

namespace {

// How a call is cut into tasks, and where in the workspace everything lies.
struct Layout {
    int64_t *first_task;     // [requests + 1]
    int64_t *first_partial;  // [requests]: numbers before this request's partial results
    int32_t *remaining;      // [requests]: parts that are not finished
    char *partials;
    char *scratch;
    int64_t scratch_bytes;  // of a thread
    int64_t tile_rows;
    int64_t threads;
    int64_t bytes;
};

inline int64_t first_part(const Step &step, const Request &request) {
    return request.first_key(0, step.window) / SPLIT;
}
inline int64_t num_parts(const Step &step, const Request &request) {
    if (request.rows <= 0) return 0;
    if (request.length <= 0) return 1;  // which writes zeros
    return round_up(request.length, SPLIT) / SPLIT - first_part(step, request);
}

// With a `base` the tasks are laid down there; without one this only measures. `is_crew` says that
// so many threads are there already, whether or not they are worth it.
template <class A>
Layout lay_out(const Step &step, int64_t threads, char *base, bool is_crew = false) {
    Layout layout;
    const int64_t group = step.heads / step.kv_heads, dim = step.head_dim;
    int64_t products = 0, tiled_rows = 0, few_vectors = 0;
    for (int64_t i = 0; i < step.num_requests; i++) {
        Request request = request_of(step, i);
        if (request.rows <= 0) continue;
        products += request.rows * request.length * step.heads * dim;
        if (has_few_rows(step, request))
            few_vectors = at_least(few_vectors, request.rows * step.heads);
        else
            tiled_rows += request.rows;
    }
    layout.threads =
        is_crew ? threads : at_least(1, at_most(threads, products / WORTH_A_THREAD));
    int64_t rows = at_least(TILE_VECTORS / group, 1);
    while (rows * group > MIN_TILE_VECTORS && rows > 1 &&
           tiled_rows / rows * step.kv_heads < 3 * layout.threads)
        rows = (rows + 1) / 2;
    layout.tile_rows = rows;

    int64_t tasks = 0, partials = 0;
    const int64_t bookkeeping =
        round_up((step.num_requests + 1) * 8 + step.num_requests * 12, 64);
    layout.first_task = (int64_t *)base;
    layout.first_partial = layout.first_task + step.num_requests + 1;
    layout.remaining = (int32_t *)(layout.first_partial + step.num_requests);
    for (int64_t i = 0; i < step.num_requests; i++) {
        Request request = request_of(step, i);
        int64_t here = 0, kept = 0;
        if (request.rows > 0 && has_few_rows(step, request)) {
            here = num_parts(step, request);
            if (here > 1) kept = here * request.rows * step.heads * (dim + 2);
        } else if (request.rows > 0) {
            here = round_up(request.rows, rows) / rows * step.kv_heads;
        }
        if (base) {
            layout.first_task[i] = tasks;
            layout.first_partial[i] = partials;
            layout.remaining[i] = int32_t(here);
        }
        tasks += here;
        partials += kept;
    }
    if (base) layout.first_task[step.num_requests] = tasks;

    const int64_t few =
        few_vectors * (2 * dim + SPLIT + 2) * int64_t(sizeof(A)) +
        (2 * SPLIT + AHEAD) * int64_t(sizeof(void *));
    const int64_t vectors = rows * group;
    const int64_t many =
        (vectors * (2 * dim + TILE_KEYS + 2) + TILE_KEYS * (dim + round_up(dim, PANEL<A>))) *
        int64_t(sizeof(A));
    layout.scratch_bytes = round_up(at_least(few, tiled_rows ? many : 0), 64) + 64;
    layout.partials = base + bookkeeping;
    layout.scratch = layout.partials + round_up(partials * int64_t(sizeof(A)), 64);
    layout.bytes = bookkeeping + round_up(partials * int64_t(sizeof(A)), 64) +
                   layout.threads * layout.scratch_bytes;
    return layout;
}

inline void prefetch(const void *from, int64_t bytes) {
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch((const char *)from + b);
}

// Rows that are needed soon, sent for in the order in which they lie: all heads of a token, then the
// next token. Computing goes through the tokens of a group once for each head, and sending for them
// in that order reads memory in strides, at nine tenths of the speed.
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

// Scores of MQ queries, `[MQ, dim]`, for the next keys, as many as a vector has lanes, into rows of
// SPLIT. With `fetches`, as many rows are sent for.
template <class E, int MQ, class A>
inline void score_keys(const E *const *keys, int64_t offset, const A *q, int64_t dim, bool fetches,
                       Ahead<E> &ahead, A *scores) {
    constexpr int NT = LANES<A> / MQ;
    for (int64_t t = 0; t < LANES<A>; t += NT) {
        const E *from[NT];
#pragma GCC unroll 16
        for (int i = 0; i < NT; i++) {
            from[i] = keys[t + i] + offset;
            if (fetches) prefetch(ahead.next(), dim * int64_t(sizeof(E)));
        }
        V<A> acc[LANES<A>];  // `= {}` would be a loop over memory
#pragma GCC unroll 16
        for (int i = 0; i < LANES<A>; i++) acc[i] = V<A>{};
        for (int64_t d = 0; d < dim; d += LANES<A>) {
            V<A> query[MQ];
#pragma GCC unroll 4
            for (int m = 0; m < MQ; m++) query[m] = load(q + m * dim + d);
#pragma GCC unroll 16
            for (int i = 0; i < NT; i++) {
                V<A> key = load(from[i] + d);
#pragma GCC unroll 4
                for (int m = 0; m < MQ; m++) acc[m * NT + i] += query[m] * key;
            }
        }
        V<A> all = sums(acc);
#pragma GCC unroll 4
        for (int m = 0; m < MQ; m++)
            __builtin_memcpy(scores + m * SPLIT + t, (const A *)&all + m * NT, NT * sizeof(A));
    }
}

// Adds the next `count` values under their weights to MQ results of DV vectors. With FETCHES, as
// many rows are sent for, from `column` on.
template <class E, int MQ, int DV, bool FETCHES, class A>
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

template <class E, int MQ, bool FETCHES, class A>
inline void weigh_heads(const E *const *values, int64_t offset, int64_t count, const A *weights,
                        int64_t dim, Ahead<E> &ahead, A *out) {
    const Ahead<E> begun = ahead;
    constexpr int MOST = (VECTOR_BYTES == 64 ? 16 : 8) / MQ;
    int64_t d = 0;
#define WEIGH(DV)                                                                               \
    if constexpr (MOST >= DV)                                                                   \
        for (; d + DV * LANES<A> <= dim; d += DV * LANES<A>) {                                  \
            ahead = begun;                                                                      \
            weigh_values<E, MQ, DV, FETCHES>(values, offset + d, count, weights, dim, ahead, d, \
                                             out + d);                                          \
        }
    WEIGH(8)
    WEIGH(4)
    WEIGH(2)
    WEIGH(1)
#undef WEIGH
}

// All queries of a group: only the first ones send for what comes next.
template <class E, class A>
inline void score_group(const E *const *keys, int64_t offset, const A *q, int64_t vectors,
                        int64_t dim, Ahead<E> &ahead, A *scores) {
    int64_t m = 0;
    for (; m + 4 <= vectors; m += 4)
        score_keys<E, 4>(keys, offset, q + m * dim, dim, m == 0, ahead, scores + m * SPLIT);
    for (; m + 2 <= vectors; m += 2)
        score_keys<E, 2>(keys, offset, q + m * dim, dim, m == 0, ahead, scores + m * SPLIT);
    for (; m < vectors; m++)
        score_keys<E, 1>(keys, offset, q + m * dim, dim, m == 0, ahead, scores + m * SPLIT);
}

template <class E, class A>
inline void weigh_group(const E *const *values, int64_t offset, int64_t count, const A *weights,
                        int64_t vectors, int64_t dim, Ahead<E> &ahead, A *out) {
    int64_t m = 0;
#define WEIGH(MQ)                                                                             \
    for (; m + MQ <= vectors; m += MQ)                                                        \
        if (m == 0)                                                                           \
            weigh_heads<E, MQ, true>(values, offset, count, weights, dim, ahead, out);        \
        else                                                                                  \
            weigh_heads<E, MQ, false>(values, offset, count, weights + m * SPLIT, dim, ahead, \
                                      out + m * dim);
    WEIGH(4)
    WEIGH(2)
    WEIGH(1)
#undef WEIGH
}

// What one part of a request's context gives, for all its rows and heads: results, largest scores
// and sums of weights go to `partial`; or, where it is null, the results to their place in the end.
template <class E>
void attend_part(const Step &step, int64_t index, const Request &request, int64_t part,
                 char *scratch, typename Wide<E>::A *partial) {
    typedef typename Wide<E>::A A;
    const int64_t group = step.heads / step.kv_heads, dim = step.head_dim;
    const int64_t vectors = request.rows * group;
    const int64_t first = at_least(part * SPLIT, request.first_key(0, step.window));
    const int64_t count = at_least(at_most((part + 1) * SPLIT, request.length) - first, 0);
    const int64_t width = round_up(count, LANES<A>);

    A *q = (A *)scratch;
    A *scores = q + step.kv_heads * vectors * dim;
    A *own = scores + step.kv_heads * vectors * SPLIT;
    // Rows of keys, of values, and places to send for behind them.
    const E **keys = (const E **)(own + step.kv_heads * vectors * (dim + 2));
    const E **values = keys + width;
    A *out = partial ? partial : own;
    A *tops = out + step.kv_heads * vectors * dim;
    A *totals = tops + step.kv_heads * vectors;

    for (int64_t head = 0; head < step.kv_heads; head++)
        for (int64_t m = 0; m < vectors; m++) {
            const E *from = (const E *)step.q + (request.first_row + m / group) * step.q_row +
                            (head * group + m % group) * step.q_head;
            A *to = q + (head * vectors + m) * dim;
            for (int64_t d = 0; d < dim; d += LANES<A>) store(to + d, load(from + d));
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
            score_group(keys + t, head * step.head_stride, q + head * vectors * dim, vectors, dim,
                        ahead, scores + head * vectors * SPLIT + t);
    }
    for (int64_t v = 0; v < step.kv_heads * vectors; v++) {
        const int64_t row = v % vectors / group;
        const int64_t from = at_least(request.first_key(row, step.window) - first, 0);
        const int64_t end = at_least(at_most(request.end_key(row) - first, count), 0);
        tops[v] = -__builtin_inf();
        totals[v] = weights_of(scores + v * SPLIT, at_most(from, width), end, width,
                               A(step.scale), A(step.softcap), tops + v);
    }
    for (int64_t i = 0; i < step.kv_heads * vectors * dim; i += LANES<A>) store(out + i, V<A>{});
    for (int64_t t = 0; t < count; t += CHUNK) {
        Ahead<E> ahead = {values + t + AHEAD, step.kv_heads, step.head_stride, 0};
        for (int64_t head = 0; head < step.kv_heads; head++)
            weigh_group(values + t, head * step.head_stride, at_most(CHUNK, count - t),
                        scores + head * vectors * SPLIT + t, vectors, dim, ahead,
                        out + head * vectors * dim);
    }
    if (!partial)
        for (int64_t v = 0; v < step.kv_heads * vectors; v++)
            give(out + v * dim, totals[v], dim,
                 out_of<E>(step, request, v / vectors, v % vectors));
}

// The parts of a request become its result; `partials` are in their order.
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
        A *out = partials + v * dim;  // the first part's place
        for (int64_t p = 0; p < parts; p++) {
            const A *part = partials + p * size;
            const A share = exponential(all_of(part[count * dim + v] - taken))[0];
            total += share * part[count * dim + count + v];
            for (int64_t d = 0; d < dim; d += LANES<A>) {
                V<A> more = share * load(part + v * dim + d);
                store(out + d, p ? load(out + d) + more : more);
            }
        }
        give(out, total, dim, out_of<E>(step, request, v / vectors, v % vectors));
    }
}

struct Team {
    const Step *step;
    Layout layout;
    int64_t num_tasks;
    int64_t taken;  // tasks; counted by all threads
    int64_t seats;  // threads that have come
};

template <class E>
void do_task(const Step &step, const Layout &layout, int64_t task, char *scratch) {
    typedef typename Wide<E>::A A;
    int64_t index = 0, above = step.num_requests;  // index: the last that begins at or before
    while (above - index > 1) {
        const int64_t middle = (index + above) / 2;
        (layout.first_task[middle] <= task ? index : above) = middle;
    }
    const Request request = request_of(step, index);
    const int64_t number = task - layout.first_task[index];
    if (!has_few_rows(step, request)) {
        const int64_t first = number / step.kv_heads * layout.tile_rows;
        const int64_t rows = at_most(layout.tile_rows, request.rows - first);
        attend_rows<E>(step, index, request, first, rows, number % step.kv_heads, scratch);
        return;
    }
    const int64_t parts = layout.first_task[index + 1] - layout.first_task[index];
    const int64_t count = request.rows * step.heads;
    if (parts == 1) {
        attend_part<E>(step, index, request, first_part(step, request), scratch, (A *)nullptr);
        return;
    }
    A *partials = (A *)layout.partials + layout.first_partial[index];
    attend_part<E>(step, index, request, first_part(step, request) + number, scratch,
                   partials + number * count * (step.head_dim + 2));
    if (__atomic_sub_fetch(layout.remaining + index, 1, __ATOMIC_ACQ_REL) == 0) {
        join_parts<E>(step, request, parts, partials);
        layout.remaining[index] = int32_t(parts);  // for the next layer
    }
}

template <class E> void work_through(void *data) {
    Team &team = *(Team *)data;
    const int64_t seat = __atomic_fetch_add(&team.seats, 1, __ATOMIC_RELAXED);
    char *scratch = team.layout.scratch + seat * team.layout.scratch_bytes;
    // From the last on: those of a prompt's last rows are the longest.
    for (;;) {
        const int64_t done = __atomic_fetch_add(&team.taken, 1, __ATOMIC_RELAXED);
        if (done >= team.num_tasks) return;
        do_task<E>(*team.step, team.layout, team.num_tasks - 1 - done, scratch);
    }
}

inline char *aligned(void *at) { return (char *)(((uintptr_t)at + 63) & ~uintptr_t(63)); }

template <class E> void attend_as(const Step &step, Parallel parallel, int64_t threads) {
    Team team;
    team.step = &step;
    team.layout = lay_out<typename Wide<E>::A>(step, threads, aligned(step.workspace));
    team.num_tasks = team.layout.first_task[step.num_requests];
    team.taken = team.seats = 0;
    if (team.layout.threads > 1 && team.num_tasks > 1 && parallel)
        parallel(work_through<E>, &team, unsigned(team.layout.threads), 0);
    else
        work_through<E>(&team);
}

struct Writes {
    const Step *step;
    int64_t taken;
};
constexpr int64_t WRITTEN_AT_ONCE = 64;

template <class E> void write_rows(void *data) {
    Writes &writes = *(Writes *)data;
    const Step &step = *writes.step;
    for (;;) {
        const int64_t first =
            __atomic_fetch_add(&writes.taken, WRITTEN_AT_ONCE, __ATOMIC_RELAXED);
        if (first >= step.num_tokens) return;
        const int64_t end = at_most(first + WRITTEN_AT_ONCE, step.num_tokens);
        for (int64_t i = first; i < end; i++) {
            const int64_t slot = step.slots[i];
            if (slot < 0) continue;
            const int64_t at = slot / step.block_size * step.block_stride +
                               slot % step.block_size * step.token_stride;
            for (int64_t head = 0; head < step.kv_heads; head++) {
                const int64_t to = at + head * step.head_stride;
                __builtin_memcpy((E *)step.keys + to,
                                 (const E *)step.k + i * step.k_row + head * step.k_head,
                                 size_t(step.head_dim) * sizeof(E));
                __builtin_memcpy((E *)step.values + to,
                                 (const E *)step.v + i * step.v_row + head * step.v_head,
                                 size_t(step.head_dim) * sizeof(E));
            }
        }
    }
}

template <class E> void write_as(const Step &step, Parallel parallel, int64_t threads) {
    Writes writes = {&step, 0};
    const int64_t numbers = step.num_tokens * step.kv_heads * step.head_dim;
    if (threads > 1 && parallel && numbers > WORTH_A_COPY)
        parallel(write_rows<E>, &writes, unsigned(threads), 0);
    else
        write_rows<E>(&writes);
}

#define BY_ELEMENT(call) BY_ELEMENT_OF(step, call)
#define BY_ELEMENT_OF(what, call)                     \
    switch (what->element) {                          \
        case FLOAT32: call(float); break;             \
        case FLOAT64: call(double); break;            \
        case BFLOAT16: call(BFloat16); break;         \
        case FLOAT16: call(Float16); break;           \
    }

int64_t workspace_bytes(const Step *step, int64_t threads) {
    const int64_t spare = 64;  // to align it
    if (step->element == FLOAT64) return lay_out<double>(*step, threads, nullptr).bytes + spare;
    return lay_out<float>(*step, threads, nullptr).bytes + spare;
}
void write(const Step *step, Parallel parallel, int64_t threads) {
#define WRITE(E) write_as<E>(*step, parallel, threads)
    BY_ELEMENT(WRITE)
#undef WRITE
}
void attend(const Step *step, Parallel parallel, int64_t threads) {
#define ATTEND(E) attend_as<E>(*step, parallel, threads)
    BY_ELEMENT(ATTEND)
#undef ATTEND
}

}  // namespace
