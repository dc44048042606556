// SPDX-License-Identifier: Apache-2.0
// All layers of a decoder in one call: norms, products, rotation, KV writes, attention.
//
//     phase        tasks                     what
//     norm         rows                      the norm of hidden states
//     qkv          rows and heads            queries, keys, values: head norms, rotation; keys and
//                                            values go to the pool
//     attend       parts of contexts, rows   as in attention.h
//     widen        rows                      attention's results, as inputs of the next product
//     out          rows and outputs          added to the hidden states, or normed first
//     norm         rows
//     gate, up     rows and outputs          with the activation
//     down         rows and outputs          added as above
//     shrink       rows and ranks            before each product with adapters, see low_rank.h
//
// In a layer with experts, these phases replace `gate, up` and `down`:
//
//     route        rows and outputs          scores of the router
//     choose       rows                      experts and their weights
//     order        one                       sorts the choices by expert, see experts.h
//     gather       choices                   copies normed rows, sorted by expert
//     gate, up     experts, rows, outputs    and of the shared expert
//     down         experts, rows, outputs    and of the shared expert
//     mix          rows                      added as above
//
// In the last layer, keys and values are computed for all rows, and queries only for the rows that
// lead to a wanted result.
//
// Between phases, values have the type of the sums, except for inputs of products, which have the
// input type of `matrix.h`.
#pragma once

#include "attention.h"
#include "crew.h"
#include "experts.h"
#include "matrix.h"
#include "product.h"
#include "rows.h"

namespace {

constexpr int64_t PHASES_OF_A_LAYER = 8, PHASES_OF_EXPERTS = 7, PHASES_OF_LAST_ROWS = 2;
constexpr int64_t PHASES_OF_ADAPTERS = 6;  // in a layer, one for each product
constexpr int64_t NUMBERS_OF_A_TASK = 1 << 13;  // elements in a task of a phase by rows

constexpr int64_t MOST_VIEWS = 8;

// The addresses of all buffers in the workspace.
template <class T, class A> struct Buffers {
    A *x, *behind, *scratch, *heads;
    A *inner;            // [rows of a product, most_rank]: results of the phase `shrink`
    T *normed, *middle;  // inputs of products
    void *q, *attended;  // elements
    Counter *counters;
    T *last_normed;      // the normed rows that have queries in the last layer
    // For experts: the scores of rows; the experts and weights of choices; inputs and results by
    // place.
    A *scores, *weights, *results;
    int64_t *chosen, *routed;
    int64_t *place_rows;  // the row in the step of the choice at each place; only with adapters
    T *gathered, *expert_middle;
    int64_t score_row, expert_row;
    char *plans[MOST_VIEWS], *last_plan;
    int64_t scratch_numbers, threads, bytes;
    int64_t state_row;  // distance between rows of hidden states
};

inline int64_t phases_of(const Pass &pass) {
    const int64_t each = PHASES_OF_A_LAYER + (pass.most_experts ? PHASES_OF_EXPERTS : 0) +
                         (pass.slots ? PHASES_OF_ADAPTERS : 0);
    return pass.num_layers * each + PHASES_OF_LAST_ROWS + 2;
}
inline int64_t crew_of(const Pass &pass, int64_t threads) {
    const int64_t mlp = pass.intermediate + pass.most_chosen * pass.expert_size;
    const int64_t weights = pass.hidden * (qkv_size(pass) + q_size(pass) + 3 * mlp);
    int64_t seen = 0;
    const Step &step = *pass.steps;
    for (int64_t i = 0; i < step.num_requests; i++) {
        const Request request = request_of(step, i);
        seen += 2 * at_least(request.rows, 0) * at_least(request.length, 0);
    }
    // A product with one row takes about as long as a product with four rows.
    const int64_t rows = at_least(pass.num_tokens, 4) / 4;
    const int64_t products = pass.num_layers * (rows * weights + seen / 4 * q_size(pass));
    return threads_for(products, pass.worth_a_thread, threads);
}

template <class E, class T, class A>
Buffers<T, A> place(const Pass &pass, int64_t threads, char *base) {
    Buffers<T, A> made;
    made.threads = crew_of(pass, threads);
    // The sum may exceed the tokens, because a row may be wanted several times.
    const int64_t tokens = at_least(pass.num_tokens, pass.num_wanted);
    const int64_t widest = at_least(pass.hidden, q_size(pass));
    const int64_t inner = at_least(pass.intermediate, pass.expert_size);
    char *at = base;
    const auto take = [&at](int64_t bytes) {
        char *here = at;
        at += round_up(bytes, 64);
        return here;
    };
    const int64_t size = sizeof(A);
    made.counters = (Counter *)take(phases_of(pass) * int64_t(sizeof(Counter)));
    made.state_row = row_of<A>(pass.hidden);
    made.x = (A *)take(tokens * made.state_row * size);
    made.normed = (T *)take(tokens * row_of<T>(widest) * int64_t(sizeof(T)));
    made.middle = (T *)take(tokens * row_of<T>(pass.intermediate) * int64_t(sizeof(T)));
    made.behind = (A *)take(tokens * made.state_row * size);
    const int64_t most_rows = tokens * at_least(pass.most_chosen, 1);
    made.inner = (A *)take(pass.slots ? most_rows * pass.most_rank * size : 0);
    made.q = take(tokens * q_size(pass) * int64_t(sizeof(E)));
    made.attended = take(tokens * row_of<E>(q_size(pass)) * int64_t(sizeof(E)));
    made.scratch_numbers =
        round_up(2 * at_least(widest, inner) * PANEL<A> + PANEL<A>, 16);
    made.scratch = (A *)take(made.threads * made.scratch_numbers * size);
    made.heads = (A *)take(made.threads * heads_numbers<A>(pass) * size);
    if (pass.most_experts) {
        const int64_t choices = tokens * pass.most_chosen;
        made.score_row = row_of<A>(pass.most_experts + 1);
        made.expert_row = row_of<T>(pass.expert_size);
        made.scores = (A *)take(tokens * made.score_row * size);
        made.weights = (A *)take(choices * size);
        made.results = (A *)take(choices * made.state_row * size);
        made.chosen = (int64_t *)take(choices * 8);
        made.routed = (int64_t *)take(routed_numbers(pass.most_experts, choices) * 8);
        made.place_rows = (int64_t *)take(pass.slots ? choices * 8 : 0);
        made.gathered = (T *)take(choices * row_of<T>(pass.hidden) * int64_t(sizeof(T)));
        made.expert_middle = (T *)take(choices * made.expert_row * int64_t(sizeof(T)));
    }
    for (int64_t view = 0; view < pass.num_views; view++)
        made.plans[view] =
            take(lay_out<A>(pass.steps[view], made.threads, nullptr, true).bytes + 64);
    if (pass.last_step) {
        made.last_normed =
            (T *)take(pass.last_step->num_tokens * row_of<T>(pass.hidden) * int64_t(sizeof(T)));
        made.last_plan = take(lay_out<A>(*pass.last_step, made.threads, nullptr, true).bytes + 64);
    }
    made.bytes = at - base + 64;
    return made;
}

// The state of one thread in a forward pass. All threads share `pass`, which does not change.
template <class E> struct Walk {
    typedef typename Wide<E>::A A;
    typedef typename InputOf<E>::T T;
    const Pass &pass;
    const Buffers<T, A> &at;
    const Layout *layouts;
    const Layout &last_layout;
    Crew crew;
    A *scratch, *heads;
    int64_t seat;
    int64_t phase;
    int64_t rows;  // rows of the hidden states; at the end, of the wanted rows only
    A *x, *behind;
    const int64_t *states_of;  // step row of each row of the hidden states; null: the same row

    template <class Task> void by_rows(int64_t count, int64_t size, Task task) {
        const int64_t each = at_least(1, NUMBERS_OF_A_TASK / size);
        go_through(crew, phase++, quotient_up(count, each), [&](int64_t i) {
            const int64_t end = at_most(count, (i + 1) * each);
            for (int64_t row = i * each; row < end; row++) task(row);
        });
    }

    template <class PutFor>
    void multiply(const T *a, int64_t count, const Matrix &matrix, Cut made, PutFor put_for,
                  const LowRank<A> &low = {}) {
        go_through(crew, phase++, made.row_blocks * made.panel_blocks, [&](int64_t i) {
            multiply_task<E>(made, i, a, row_of<T>(matrix.ins), count, matrix, scratch, put_for,
                             Wanted<A>{nullptr, 0}, low);
        });
    }
    template <class PutFor> void multiply(const T *a, const Matrix &matrix, PutFor put_for) {
        const LowRank<A> low = shrink(a, matrix);
        multiply(a, rows, matrix, cut<E>(matrix, rows, crew.threads), put_for, low);
    }

    // Computes `a @ in.T` of the rows' adapters for a product of the hidden states with `matrix`.
    // Returns what the product needs to add the adapters.
    LowRank<A> shrink(const T *a, const Matrix &matrix) {
        LowRank<A> low = {};
        if (!pass.slots || !matrix.adapters) return low;
        low = {matrix.adapters, pass.slots, states_of, at.inner, pass.most_rank, nullptr, 0, 0};
        go_through(crew, phase++, low.shrink_tasks(rows), [&](int64_t task) {
            low.shrink(task, a, row_of<T>(matrix.ins), rows, matrix.ins,
                       [&](int64_t row) { return low.adapter_of(row); });
        });
        return low;
    }

    // Adds the product to the hidden states or, with `is_normed`, stores it for the norm that
    // follows.
    void add_product(const T *a, const Matrix &matrix, bool is_normed) {
        if (is_normed)
            multiply(a, matrix, [&](int64_t row, int64_t) {
                return Stored<A, A>{matrix, behind + row * at.state_row, at.state_row};
            });
        else
            multiply(a, matrix, [&](int64_t row, int64_t) {
                return Added<A>{matrix, x + row * at.state_row, at.state_row};
            });
    }

    // Adds the stored product of the previous part, after its norm `left`, to the hidden states.
    // Then computes the norm before the next part.
    void norm(const void *left, const void *weight, int64_t layer = -1) {
        void *kept = pass.states && layer >= 0 ? pass.states[layer] : nullptr;
        by_rows(rows, pass.hidden, [&](int64_t row) {
            A *states = x + row * at.state_row;
            if (left) {
                A *more = behind + row * at.state_row;
                normalise(more, (const A *)left, pass.hidden, A(pass.eps), more);
                add(more, pass.hidden, states);
            }
            if (kept) narrow_all(states, pass.hidden, (E *)kept + row * pass.hidden);
            if (layer == pass.num_layers) {  // the norm after the last layer
                E *to = (E *)pass.result + row * pass.hidden;
                normalise(states, (const A *)weight, pass.hidden, A(pass.eps), to);
                return;
            }
            T *to = at.normed + row * row_of<T>(pass.hidden);
            normalise(states, (const A *)weight, pass.hidden, A(pass.eps), to);
            pad(to, pass.hidden);
        });
    }

    // Computes the heads of `matrix`, the layer's heads from `first_head` on, for `count` rows. The
    // i-th row is row `of_step[i]` of the step, or row i if `of_step` is null.
    void multiply_heads(const LayerWeights &layer, const T *a, int64_t count, const Matrix &matrix,
                        int64_t first_head, const LowRank<A> &low,
                        const int64_t *of_step = nullptr) {
        const int64_t together = heads_together<A>(pass);
        const int64_t unit = together * pass.head_dim / PANEL<A>;
        const Cut made = cut<E>(matrix, count, crew.threads, unit);
        multiply(a, count, matrix, made, [&](int64_t row, int64_t end) {
            return Heads<E, A>{pass, layer, matrix, of_step, (E *)at.q, heads,
                               heads_row<A>(pass), row, end - row, first_head, together, unit};
        }, low);
    }

    // Computes the last layer's keys and values of all rows, and its queries of `last_rows`.
    void take_last_rows(const LayerWeights &layer) {
        Matrix queries = layer.qkv, others = layer.qkv;
        queries.outs = q_size(pass);
        others.outs -= q_size(pass);
        others.packed = (const E *)others.packed + q_size(pass) * padded<T>(others.ins);
        if (others.bias) others.bias = (const A *)others.bias + q_size(pass);
        LowRank<A> low = shrink(at.normed, layer.qkv);
        low.first_panel = q_size(pass) / PANEL<A>;
        multiply_heads(layer, at.normed, rows, others, pass.heads, low);
        const int64_t count = pass.last_step->num_tokens, size = row_of<T>(pass.hidden);
        by_rows(count, pass.hidden, [&](int64_t i) {
            __builtin_memcpy(at.last_normed + i * size, at.normed + pass.last_rows[i] * size,
                             size_t(padded<T>(pass.hidden)) * sizeof(T));
        });
        low.first_panel = 0;
        low.slot_of = low.inner_of = pass.last_rows;
        multiply_heads(layer, at.last_normed, count, queries, 0, low, pass.last_rows);
    }

    void attend(const LayerWeights &layer, Step step, const Layout &layout) {
        step.q = at.q;
        step.out = at.attended;
        step.q_row = q_size(pass);
        step.out_row = row_of<E>(q_size(pass));
        step.q_head = step.out_head = pass.head_dim;
        step.keys = layer.keys;
        step.values = layer.values;
        char *own = layout.scratch + seat * layout.scratch_bytes;
        go_through(crew, phase++, layout.num_tasks,
                   [&](int64_t i) { do_task<E>(step, layout, layout.task_in_turn(i), own); });
    }

    // Converts attention's results to inputs of the next product. In the last layer, selects the
    // results and hidden states of the wanted rows.
    const T *take_attended(bool is_last) {
        const bool picks = is_last && pass.wanted;
        if (!picks && sizeof(E) == sizeof(T)) {
            phase++;
            return (const T *)at.attended;
        }
        const int64_t size = q_size(pass);
        const int64_t count = picks ? pass.num_wanted : rows;
        by_rows(count, size, [&](int64_t row) {
            const int64_t from = picks ? pass.wanted[row] : row;
            const int64_t attended = picks && pass.last_step ? pass.last_wanted[row] : from;
            take_inputs((const E *)at.attended + attended * row_of<E>(size), size,
                        at.normed + row * row_of<T>(size));
            if (picks)
                __builtin_memcpy(behind + row * at.state_row, x + from * at.state_row,
                                 size_t(pass.hidden) * sizeof(A));
        });
        return at.normed;
    }

    // Like `shrink`, for the experts' products with `matrices`; the rows are the choices, by place.
    LowRank<A> shrink_experts(const Routed &routed, const Matrix *matrices, const T *inputs,
                              int64_t inputs_row, int64_t choices) {
        LowRank<A> low = {};
        if (!pass.slots || !matrices[0].adapters) return low;
        low = {matrices[0].adapters, pass.slots, at.place_rows, at.inner, pass.most_rank, nullptr, 0, 0};
        go_through(crew, phase++, low.shrink_tasks(choices), [&](int64_t task) {
            low.shrink(task, inputs, inputs_row, choices, matrices[0].ins, [&](int64_t place) {
                const Matrix &matrix = matrices[at.chosen[routed.choice_at[place]]];
                return low.adapter_of(place, matrix.adapters);
            });
        });
        return low;
    }

    // Computes the experts' products with `matrices`; `tasks` is `up_tasks` or `down_tasks`.
    template <class PutFor>
    void multiply_experts(const Routed &routed, const int64_t *tasks, const Matrix *matrices,
                          int64_t unit, const T *inputs, int64_t inputs_row, int64_t choices,
                          int64_t counted, PutFor put_for) {
        const int64_t count_of_tasks = crew.counters[counted].tasks;
        const LowRank<A> low = shrink_experts(routed, matrices, inputs, inputs_row, choices);
        go_through(crew, phase++, count_of_tasks, [&](int64_t task) {
            const int64_t active = *routed.num_active;
            const int64_t i = active_of(tasks, active, task), e = routed.active[i];
            const int64_t first = routed.starts[e], count = routed.starts[e + 1] - first;
            const Matrix &matrix = matrices[e];
            LowRank<A> own = low.from(first);
            if (low.adapters) own.adapters = matrix.adapters;
            const Cut made = cut<E>(matrix, count, crew.threads, unit, active);
            multiply_task<E>(made, task - tasks[i], inputs + first * inputs_row, inputs_row, count,
                             matrix, scratch,
                             [&](int64_t row, int64_t) { return put_for(matrix, first + row); },
                             Wanted<A>{nullptr, 0}, own);
        });
    }

    void multiply_gated(const T *inputs, const LayerWeights &layer) {
        multiply(inputs, layer.gate_up, [&](int64_t row, int64_t) {
            const int64_t to = row_of<T>(layer.down.ins);
            return Gated<T, A>{layer.gate_up, at.middle + row * to, to, pass.activation == 1};
        });
    }

    void mix_experts(const LayerWeights &layer) {
        const Experts &experts = *layer.experts;
        const int64_t each = experts.num_chosen, choices = rows * each;
        Routed routed = routed_at(at.routed, experts.num_experts, choices);
        multiply(at.normed, experts.router, [&](int64_t row, int64_t) {
            return Stored<A, A>{experts.router, at.scores + row * at.score_row, at.score_row};
        });
        by_rows(rows, experts.num_experts * each, [&](int64_t row) {
            choose(experts, at.scores + row * at.score_row, at.chosen + row * each,
                   at.weights + row * each);
            if (!pass.chosen) return;
            int32_t *told =
                pass.chosen + (experts.number * pass.chosen_row + row) * pass.most_chosen;
            for (int64_t j = 0; j < each; j++) told[j] = int32_t(at.chosen[row * each + j]);
        });
        const int64_t counted = phase;  // its counters have the products' numbers of tasks
        Counter *const products = crew.counters + counted;
        go_through(crew, phase++, 1, [&](int64_t) {
            lay_down<E>(experts, at.chosen, choices, crew.threads, routed);
            products[0].tasks = routed.up_tasks[*routed.num_active];
            products[1].tasks = routed.down_tasks[*routed.num_active];
        });
        const int64_t inputs_row = row_of<T>(pass.hidden);
        by_rows(choices, pass.hidden, [&](int64_t place) {
            __builtin_memcpy(at.gathered + place * inputs_row,
                             at.normed + routed.choice_at[place] / each * inputs_row,
                             size_t(padded<T>(pass.hidden)) * sizeof(T));
            pad(at.expert_middle + place * at.expert_row, pass.expert_size);
            if (!pass.slots) return;
            const int64_t row = routed.choice_at[place] / each;
            at.place_rows[place] = states_of ? states_of[row] : row;
        });
        multiply_experts(routed, routed.up_tasks, experts.gate_ups, 2, at.gathered, inputs_row,
                         choices, counted,
                         [&](const Matrix &matrix, int64_t place) {
                             return Gated<T, A>{matrix, at.expert_middle + place * at.expert_row,
                                                at.expert_row, pass.activation == 1};
                         });
        multiply_experts(routed, routed.down_tasks, experts.downs, 1, at.expert_middle,
                         at.expert_row, choices, counted + 1, [&](const Matrix &matrix, int64_t place) {
                             return Stored<A, A>{matrix, at.results + place * at.state_row,
                                                 at.state_row};
                         });
        const bool is_normed = layer.after_mlp_norm != nullptr;
        if (experts.has_shared) {
            multiply_gated(at.normed, layer);
            multiply(at.middle, layer.down, [&](int64_t row, int64_t) {
                return Stored<A, A>{layer.down, behind + row * at.state_row, at.state_row};
            });
        }
        by_rows(rows, pass.hidden * each, [&](int64_t row) {
            A *shared = behind + row * at.state_row, *states = x + row * at.state_row;
            A *to = is_normed ? shared : states;
            if (experts.has_shared) {
                const A score = at.scores[row * at.score_row + experts.num_experts];
                const A gate = A(1) / (A(1) + exponential_of<A>(-score));
                for (int64_t d = 0; d < pass.hidden; d++)
                    to[d] = (is_normed ? A(0) : to[d]) + gate * shared[d];
            } else if (is_normed) {
                for (int64_t d = 0; d < pass.hidden; d++) to[d] = A(0);
            }
            add_choices(routed.place_of + row * each, at.weights + row * each, each, at.results,
                        at.state_row, pass.hidden, to);
        });
    }

    void use_wanted() {
        A *all = x;
        x = behind;
        behind = all;
        rows = pass.num_wanted;
        states_of = pass.wanted;
    }

    void run() {
        by_rows(rows, pass.hidden, [&](int64_t row) {
            widen((const E *)pass.x + row * pass.hidden, pass.hidden, x + row * at.state_row);
            pad(at.middle + row * row_of<T>(pass.intermediate), pass.intermediate);
        });
        const void *left = nullptr;
        for (int64_t i = 0; i < pass.num_layers; i++) {
            const LayerWeights &layer = pass.layers[i];
            const bool is_last = i + 1 == pass.num_layers;
            norm(left, layer.attention_norm, i);
            if (is_last && pass.last_step) {
                take_last_rows(layer);
                attend(layer, *pass.last_step, last_layout);
            } else {
                multiply_heads(layer, at.normed, rows, layer.qkv, 0, shrink(at.normed, layer.qkv));
                attend(layer, pass.steps[layer.view], layouts[layer.view]);
            }
            const T *mixed = take_attended(is_last);
            if (is_last && pass.wanted) use_wanted();
            add_product(mixed, layer.out, layer.after_attention_norm != nullptr);
            norm(layer.after_attention_norm, layer.mlp_norm);
            if (layer.experts) {
                mix_experts(layer);
            } else {
                multiply_gated(at.normed, layer);
                add_product(at.middle, layer.down, layer.after_mlp_norm != nullptr);
            }
            left = layer.after_mlp_norm;
        }
        norm(left, pass.last_norm, pass.num_layers);
    }
};

template <class E> struct Passage {
    typedef typename Wide<E>::A A;
    typedef typename InputOf<E>::T T;
    const Pass *pass;
    Buffers<T, A> at;
    Layout layouts[MOST_VIEWS], last_layout;
    int64_t seats;  // threads that have arrived
};

template <class E> void walk(void *data) {
    Passage<E> &passage = *(Passage<E> *)data;
    const auto &at = passage.at;
    const int64_t seat = __atomic_fetch_add(&passage.seats, 1, __ATOMIC_RELAXED);
    Walk<E> own = {*passage.pass, at, passage.layouts, passage.last_layout,
                   {at.counters, at.threads}, at.scratch + seat * at.scratch_numbers,
                   at.heads + seat * heads_numbers<typename Wide<E>::A>(*passage.pass),
                   seat, 0, passage.pass->num_tokens, at.x, at.behind, nullptr};
    own.run();
}

template <class E> int64_t pass_bytes_as(const Pass &pass, int64_t threads) {
    return place<E, typename InputOf<E>::T, typename Wide<E>::A>(pass, threads, nullptr).bytes + 64;
}

template <class E> void pass_as(const Pass &pass, Parallel parallel, int64_t threads) {
    typedef typename Wide<E>::A A;
    typedef typename InputOf<E>::T T;
    Passage<E> passage;
    passage.pass = &pass;
    // The layout is that of `pass_bytes_as`, also without `parallel`: a layout for one thread may
    // need more memory than there is, and one thread can compute the tasks of several.
    passage.at = place<E, T, A>(pass, threads, aligned(pass.workspace));
    passage.seats = 0;
    for (int64_t view = 0; view < pass.num_views; view++)
        passage.layouts[view] =
            lay_out<A>(pass.steps[view], passage.at.threads, aligned(passage.at.plans[view]), true);
    if (pass.last_step)
        passage.last_layout =
            lay_out<A>(*pass.last_step, passage.at.threads, aligned(passage.at.last_plan), true);
    if (passage.at.threads > 1)
        __builtin_memset(passage.at.counters, 0, size_t(phases_of(pass)) * sizeof(Counter));
    if (passage.at.threads > 1 && parallel)
        parallel(walk<E>, &passage, unsigned(passage.at.threads), 0);
    else
        walk<E>(&passage);
}

int64_t panel(int64_t element) { return element == FLOAT64 ? PANEL<double> : PANEL<float>; }
int64_t together(int64_t element) {
    return element == BFLOAT16 ? Inputs<InputOf<BFloat16>::T>::TOGETHER : 1;
}
template <class E>
void pack_as(const void *weight, int64_t row, const Matrix &matrix, int64_t offset) {
    pack_into<typename InputOf<E>::T, typename Wide<E>::A>((const E *)weight, row, matrix, offset,
                                                           (E *)matrix.packed);
}
void pack(const void *weight, int64_t row, const Matrix *matrix, int64_t offset, int64_t element) {
#define PACK(E) pack_as<E>(weight, row, *matrix, offset)
    BY_ELEMENT_OF(element, PACK)
#undef PACK
}

#define RETURN_BYTES(E) return product_bytes_as<E>(*product, threads)
int64_t product_bytes(const Product *product, int64_t threads) {
    BY_ELEMENT_OF(product->element, RETURN_BYTES)
    return 0;
}
#undef RETURN_BYTES
void multiply(const Product *product, Parallel parallel, int64_t threads) {
#define MULTIPLY(E) multiply_as<E>(*product, parallel, threads)
    BY_ELEMENT_OF(product->element, MULTIPLY)
#undef MULTIPLY
}
int64_t pass_bytes(const Pass *pass, int64_t threads) {
#define RETURN_BYTES(E) return pass_bytes_as<E>(*pass, threads)
    BY_ELEMENT_OF(pass->element, RETURN_BYTES)
#undef RETURN_BYTES
    return 0;
}
void pass(const Pass *given, Parallel parallel, int64_t threads) {
#define PASS(E) pass_as<E>(*given, parallel, threads)
    BY_ELEMENT_OF(given->element, PASS)
#undef PASS
}

}  // namespace
