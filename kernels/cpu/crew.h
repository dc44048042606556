// SPDX-License-Identifier: Apache-2.0
// Threads that compute the phases of a call together.
//
// A phase ends when its tasks are done, not when every thread has arrived: a thread that the system
// does not run delays only the task that it has begun, and a late thread joins the current phase. A
// single thread counts no tasks.
#pragma once

#include "step.h"

#include <immintrin.h>
#include <sched.h>

namespace {

struct Counter {
    int64_t taken, done;
    // The number of this phase's tasks, if an earlier phase computes the number: a late thread must
    // not read the number of another layer.
    int64_t tasks;
    int64_t apart[5];  // so that each counter fills a cache line
};

struct Crew {
    Counter *counters;  // one for each phase, initialised to zero
    int64_t threads;
};

// A waiting thread spins so many times, some 20 us, and then yields the core to other programs.
constexpr int PATIENCE = 1000;

template <class Task> inline void go_through(Crew &crew, int64_t phase, int64_t tasks, Task task) {
    if (crew.threads == 1) {
        for (int64_t i = 0; i < tasks; i++) task(i);
        return;
    }
    Counter &counter = crew.counters[phase];
    if (__atomic_load_n(&counter.done, __ATOMIC_ACQUIRE) >= tasks) return;
    for (;;) {
        const int64_t i = __atomic_fetch_add(&counter.taken, 1, __ATOMIC_RELAXED);
        if (i >= tasks) break;
        task(i);
        __atomic_fetch_add(&counter.done, 1, __ATOMIC_RELEASE);
    }
    for (int waited = 0; __atomic_load_n(&counter.done, __ATOMIC_ACQUIRE) < tasks;) {
        _mm_pause();
        if (++waited == PATIENCE) {
            sched_yield();
            waited = 0;
        }
    }
}

}  // namespace
