// SPDX-License-Identifier: Apache-2.0
// Attention that reads the paged pool directly, without a gather.
//
// `layout.h` defines the tasks of the threads; the thread that ends the last part of a request's
// context combines the partial results of all parts.
//
// Parts always begin at the same positions and are combined in their order, so a request's result
// depends, in no bit, on other requests or on the number of threads. Sums have the type of the
// pool, or float32 for a 16-bit pool.
#pragma once

#include "parts.h"

namespace {

struct Team {
    const Step *step;
    Layout layout;
    int64_t taken;  // tasks that threads have begun
    int64_t seats;  // threads that have arrived; gives each thread its scratch
};

template <class E>
void do_task(const Step &step, const Layout &layout, int64_t number, char *scratch) {
    const Task &task = layout.tasks[number];
    const Member &member = layout.members[task.first];
    const Request request = request_of(step, member.request);
    if (has_few_rows(step, request)) {
        by_factors<E>(step.head_dim, [&](auto factors) {
            attend_part<E, decltype(factors)>(step, layout, task, scratch);
        });
        return;
    }
    const int64_t first = member.number / step.kv_heads * layout.tile_rows;
    const int64_t rows = at_most(layout.tile_rows, request.rows - first);
    by_factors<E>(step.head_dim, [&](auto factors) {
        attend_rows<E, decltype(factors)>(step, member.request, request, first, rows,
                                          member.number % step.kv_heads, scratch);
    });
}

template <class E> void work_through(void *data) {
    Team &team = *(Team *)data;
    const int64_t seat = __atomic_fetch_add(&team.seats, 1, __ATOMIC_RELAXED);
    char *scratch = team.layout.scratch + seat * team.layout.scratch_bytes;
    for (;;) {
        const int64_t done = __atomic_fetch_add(&team.taken, 1, __ATOMIC_RELAXED);
        if (done >= team.layout.num_tasks) return;
        do_task<E>(*team.step, team.layout, team.layout.task_in_turn(done), scratch);
    }
}

inline char *aligned(void *at) { return (char *)(((uintptr_t)at + 63) & ~uintptr_t(63)); }

template <class E> void attend_as(const Step &step, Parallel parallel, int64_t threads) {
    Team team;
    team.step = &step;
    team.layout = lay_out<typename Wide<E>::A>(step, threads, aligned(step.workspace));
    team.taken = team.seats = 0;
    if (team.layout.threads > 1 && team.layout.num_tasks > 1 && parallel)
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

#ifdef __AVX512BF16__  // this variant has bfloat16 only, see library.cpp
#define BY_ELEMENT_OF(element, call) \
    if (element == BFLOAT16) call(BFloat16);
#else
#define BY_ELEMENT_OF(element, call)                  \
    switch (element) {                                \
        case FLOAT32: call(float); break;             \
        case FLOAT64: call(double); break;            \
        case BFLOAT16: call(BFloat16); break;         \
        case FLOAT16: call(Float16); break;           \
    }
#endif

int64_t workspace_bytes(const Step *step, int64_t threads) {
    const int64_t spare = 64;  // for the alignment of the workspace
    if (step->element == FLOAT64) return lay_out<double>(*step, threads, nullptr).bytes + spare;
    return lay_out<float>(*step, threads, nullptr).bytes + spare;
}
void write(const Step *step, Parallel parallel, int64_t threads) {
#define WRITE(E) write_as<E>(*step, parallel, threads)
    BY_ELEMENT_OF(step->element, WRITE)
#undef WRITE
}
void attend(const Step *step, Parallel parallel, int64_t threads) {
#define ATTEND(E) attend_as<E>(*step, parallel, threads)
    BY_ELEMENT_OF(step->element, ATTEND)
#undef ATTEND
}

}  // namespace
