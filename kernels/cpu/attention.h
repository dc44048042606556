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

#include "parts.h"
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
    layout.threads = is_crew ? threads : threads_for(products, step.worth_a_thread, threads);
    const int64_t most = at_most(TILE_VECTORS, TILE_NUMBERS / dim);
    int64_t rows = at_least(most / group, 1);
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

    const int64_t few = few_vectors ? PartScratch<A>{few_vectors, dim}.bytes() : 0;
    const int64_t many = tiled_rows ? TileScratch<A>{rows * group, dim}.bytes() : 0;
    layout.scratch_bytes = round_up(at_least(few, many), 64) + 64;
    layout.partials = base + bookkeeping;
    layout.scratch = layout.partials + round_up(partials * int64_t(sizeof(A)), 64);
    layout.bytes = bookkeeping + round_up(partials * int64_t(sizeof(A)), 64) +
                   layout.threads * layout.scratch_bytes;
    return layout;
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
        by_factors<E>(step.head_dim, [&](auto factors) {
            attend_rows<E, decltype(factors)>(step, index, request, first, rows,
                                              number % step.kv_heads, scratch);
        });
        return;
    }
    const int64_t parts = layout.first_task[index + 1] - layout.first_task[index];
    const int64_t count = request.rows * step.heads;
    const bool is_all = parts == 1;
    A *partials = (A *)layout.partials + layout.first_partial[index];
    A *partial = is_all ? nullptr : partials + number * count * (step.head_dim + 2);
    by_factors<E>(step.head_dim, [&](auto factors) {
        attend_part<E, decltype(factors)>(step, index, request, first_part(step, request) + number,
                                          scratch, partial);
    });
    if (is_all) return;
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
