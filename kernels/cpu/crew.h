// SPDX-License-Identifier: Apache-2.0
// Threads that go through the phases of a call together.
//
// A phase is over when its tasks are done, not when every thread has come: one that the system does
// not run holds up only the task that it has taken, and one that comes late goes on where the
// others are. With one thread nothing is counted.
#pragma once

#include "step.h"

#include <immintrin.h>
#include <sched.h>

namespace {

struct Counter {
    int64_t taken, done;
    // The number of this phase's tasks, where an earlier phase counts them: a late thread must not
    // read another layer's number.
    int64_t tasks;
    int64_t apart[5];  // a line of the cache for each
};

struct Crew {
    Counter *counters;  // of each phase, zeros to begin with
    int64_t threads;
};

// Spins of a wait, some 20 us, before it yields: another program is likely to want the core.
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
