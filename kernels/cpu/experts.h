// SPDX-License-Identifier: Apache-2.0
// The choice of experts for each row, and the order in which the experts' rows are computed.
//
//     row       of the hidden states; the number of its j-th choice is `row * num_chosen + j`
//     place     index of a choice, sorted by expert: an expert's choices are adjacent, so that its
//               matrices are read once
#pragma once

#include "matrix.h"

namespace {

// The experts that have rows in one layer, and the tasks of their products.
struct Routed {
    int64_t *place_of;   // [choices]
    int64_t *choice_at;  // [choices]: the choice at each place
    int64_t *starts;     // [experts + 1]: the first place of each expert
    int64_t *active;     // [experts]: the `num_active` experts that have rows
    int64_t *up_tasks;   // [experts + 1]: the first task of the i-th active expert
    int64_t *down_tasks;
    int64_t *num_active;
};

inline int64_t routed_numbers(int64_t experts, int64_t choices) {
    return 2 * choices + 4 * (experts + 1) + 1;
}
inline Routed routed_at(int64_t *memory, int64_t experts, int64_t choices) {
    Routed made;
    const auto take = [&memory](int64_t count) {
        int64_t *here = memory;
        memory += count;
        return here;
    };
    made.place_of = take(choices);
    made.choice_at = take(choices);
    made.starts = take(experts + 1);
    made.active = take(experts + 1);
    made.up_tasks = take(experts + 1);
    made.down_tasks = take(experts + 1);
    made.num_active = take(1);
    return made;
}

template <class A> inline A exponential_of(A x) { return exponential(all_of(x))[0]; }

// Writes the experts with the highest scores of a row, by index if scores are equal, and their
// weights.
template <class A>
inline void choose(const Experts &experts, const A *scores, int64_t *chosen, A *weights) {
    const int64_t count = experts.num_experts, wanted = experts.num_chosen;
    for (int64_t j = 0; j < wanted; j++) {
        int64_t best = -1;
        for (int64_t e = 0; e < count; e++) {
            // Scores fall from choice to choice; among equal scores, expert indices rise.
            const bool is_left =
                j == 0 || scores[e] < weights[j - 1] ||
                (scores[e] == weights[j - 1] && e > chosen[j - 1]);
            if (is_left && (best < 0 || scores[e] > scores[best])) best = e;
        }
        if (best < 0) {  // the scores are NaN
            best = j;
            chosen[j] = best;
            weights[j] = __builtin_nan("");
            continue;
        }
        chosen[j] = best;
        weights[j] = scores[best];
    }
    const A most = weights[0];
    A total = A(0);
    if (experts.normalises)
        for (int64_t j = 0; j < wanted; j++) total += exponential_of<A>(weights[j] - most);
    else
        for (int64_t e = 0; e < count; e++) total += exponential_of<A>(scores[e] - most);
    for (int64_t j = 0; j < wanted; j++)
        weights[j] = exponential_of<A>(weights[j] - most) / total;
}

// Writes the order of `choices` choices, and the tasks of their products, to `routed`.
template <class E>
inline void lay_down(const Experts &experts, const int64_t *chosen, int64_t choices,
                     int64_t threads, Routed &routed) {
    const int64_t count = experts.num_experts;
    int64_t *starts = routed.starts;
    for (int64_t e = 0; e <= count; e++) starts[e] = 0;
    for (int64_t i = 0; i < choices; i++) starts[chosen[i] + 1]++;
    int64_t active = 0;
    for (int64_t e = 0; e < count; e++) {
        if (starts[e + 1]) routed.active[active++] = e;
        starts[e + 1] += starts[e];
    }
    *routed.num_active = active;
    // `up_tasks` temporarily has the place of the next choice of each expert.
    for (int64_t e = 0; e < count; e++) routed.up_tasks[e] = starts[e];
    for (int64_t i = 0; i < choices; i++) {
        const int64_t place = routed.up_tasks[chosen[i]]++;
        routed.place_of[i] = place;
        routed.choice_at[place] = i;
    }
    routed.up_tasks[0] = routed.down_tasks[0] = 0;
    for (int64_t i = 0; i < active; i++) {
        const int64_t e = routed.active[i], rows = starts[e + 1] - starts[e];
        const Cut up = cut<E>(experts.gate_ups[e], rows, threads, 2, active);
        const Cut down = cut<E>(experts.downs[e], rows, threads, 1, active);
        routed.up_tasks[i + 1] = routed.up_tasks[i] + up.row_blocks * up.panel_blocks;
        routed.down_tasks[i + 1] = routed.down_tasks[i] + down.row_blocks * down.panel_blocks;
    }
}

// Returns the index, among the active experts, of the expert to which `task` belongs.
inline int64_t active_of(const int64_t *tasks, int64_t active, int64_t task) {
    int64_t low = 0, high = active;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (tasks[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// `to` += the results of a row's experts, each multiplied by its weight.
template <class A>
inline void add_choices(const int64_t *place_of, const A *weights, int64_t count, const A *results,
                        int64_t results_row, int64_t size, A *to) {
    for (int64_t j = 0; j < count; j++) {
        const A *from = results + place_of[j] * results_row;
        const A weight = weights[j];
        int64_t d = 0;
        for (; d + LANES<A> <= size; d += LANES<A>)
            store(to + d, load(to + d) + weight * load(from + d));
        for (; d < size; d++) to[d] += weight * from[d];
    }
}

}  // namespace
