// SPDX-License-Identifier: Apache-2.0
// A single product of rows of elements with a packed matrix.
#pragma once

#include "attention.h"
#include "crew.h"
#include "matrix.h"

namespace {

template <class E> struct ProductWork {
    typedef typename Wide<E>::A A;
    typedef typename InputOf<E>::T T;
    const Product *product;
    const T *x;
    int64_t x_row;
    A *widened;  // memory for converted panels, for each thread
    int64_t widened_numbers, threads;
    A *inner;  // [rows, most_rank]: results of the phase `shrink`
    Cut made;
    Counter counters[2];
    int64_t seats;
};

template <class E> inline int64_t product_threads(const Product &product, int64_t threads) {
    typedef typename Wide<E>::A A;
    const Wanted<A> wanted = {product.wanted, product.wanted_words};
    const int64_t outs = wanted.of(panels_of<A>(product.matrix)) * PANEL<A>;
    const int64_t products = at_least(product.rows, 4) / 4 * product.matrix.ins * outs;
    return threads_for(products, product.worth_a_thread, threads);
}

template <class E> void work_on(void *data) {
    typedef typename Wide<E>::A A;
    ProductWork<E> &work = *(ProductWork<E> *)data;
    const Product &product = *work.product;
    const Matrix &matrix = product.matrix;
    const int64_t seat = __atomic_fetch_add(&work.seats, 1, __ATOMIC_RELAXED);
    A *widened = work.widened + seat * work.widened_numbers;
    Crew crew = {work.counters, work.threads};
    LowRank<A> low = {};
    if (work.inner) {
        low = {matrix.adapters, product.slots, nullptr, work.inner, product.most_rank, nullptr, 0, 0};
        go_through(crew, 1, low.shrink_tasks(product.rows), [&](int64_t task) {
            low.shrink(task, work.x, work.x_row, product.rows, matrix.ins,
                       [&](int64_t row) { return low.adapter_of(row); });
        });
    }
    go_through(crew, 0, work.made.row_blocks * work.made.panel_blocks, [&](int64_t i) {
        if (matrix.is_pair)
            multiply_task<E>(work.made, i, work.x, work.x_row, product.rows, matrix, widened,
                             [&](int64_t row, int64_t) {
                                 return Gated<E, A>{matrix,
                                                    (E *)product.out + row * product.out_row,
                                                    product.out_row, product.activation == 1};
                             },
                             Wanted<A>{nullptr, 0}, low);
        else if (product.is_wide)
            multiply_task<E>(work.made, i, work.x, work.x_row, product.rows, matrix, widened,
                             [&](int64_t row, int64_t) {
                                 return Widened<E, A>{matrix,
                                                      (A *)product.out + row * product.out_row,
                                                      product.out_row};
                             },
                             Wanted<A>{product.wanted, product.wanted_words}, low);
        else
            multiply_task<E>(work.made, i, work.x, work.x_row, product.rows, matrix, widened,
                             [&](int64_t row, int64_t) {
                                 return Stored<E, A>{matrix,
                                                     (E *)product.out + row * product.out_row,
                                                     product.out_row};
                             },
                             Wanted<A>{product.wanted, product.wanted_words}, low);
    });
}

// Whether the rows of x can be inputs without a copy. Rows whose starts fall into few sets of the
// cache are copied.
template <class E> inline bool are_inputs(const Product &product) {
    typedef typename InputOf<E>::T T;
    return sizeof(E) == sizeof(T) && Inputs<T>::TOGETHER == 1 &&
           (product.rows <= 8 || product.x_row * int64_t(sizeof(E)) % 2048 != 0);
}

inline bool has_adapters(const Product &product) {
    return product.slots && product.matrix.adapters && product.most_rank;
}

template <class E> int64_t product_bytes_as(const Product &product, int64_t threads) {
    typedef typename Wide<E>::A A;
    typedef typename InputOf<E>::T T;
    const int64_t ins = product.matrix.ins;
    const int64_t inputs =
        are_inputs<E>(product) ? 0 : product.rows * row_of<T>(ins) * int64_t(sizeof(T));
    const int64_t inner = has_adapters(product) ? product.rows * product.most_rank : 0;
    return inputs + (threads * (2 * round_up(ins, 16) * PANEL<A> + 16) + inner) * int64_t(sizeof(A)) +
           64;
}

template <class E> void multiply_as(const Product &product, Parallel parallel, int64_t threads) {
    typedef typename Wide<E>::A A;
    typedef typename InputOf<E>::T T;
    const Matrix &matrix = product.matrix;
    const int64_t ins = round_up(matrix.ins, 16);
    ProductWork<E> work;
    work.product = &product;
    char *at = aligned(product.workspace);
    if (are_inputs<E>(product)) {
        work.x = (const T *)product.x;
        work.x_row = product.x_row;
    } else {
        T *inputs = (T *)at;
        work.x = inputs;
        work.x_row = row_of<T>(matrix.ins);
        for (int64_t row = 0; row < product.rows; row++)
            take_inputs((const E *)product.x + row * product.x_row, matrix.ins,
                        inputs + row * work.x_row);
        at += product.rows * work.x_row * int64_t(sizeof(T));
    }
    work.widened = (A *)at;
    work.widened_numbers = 2 * ins * PANEL<A> + 16;
    work.threads = parallel ? product_threads<E>(product, threads) : 1;
    work.made = cut<E>(matrix, product.rows, work.threads);
    work.inner = has_adapters(product) ? work.widened + threads * work.widened_numbers : nullptr;
    work.counters[0] = work.counters[1] = Counter{};
    work.seats = 0;
    if (work.threads > 1)
        parallel(work_on<E>, &work, unsigned(work.threads), 0);
    else
        work_on<E>(&work);
}

}  // namespace
