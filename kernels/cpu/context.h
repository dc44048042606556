// SPDX-License-Identifier: Apache-2.0
// What both ways of attending share: sizes, a request's rows and keys, where results go.
#pragma once

#include "step.h"
#include "vectors.h"

namespace {

constexpr int64_t SPLIT = 256;        // tokens of a part of a context
// Tokens whose values all heads weigh before the next ones: those of CHUNK_BYTES, from 4 to CHUNK.
// Fewer tokens are closer to the order of memory.
constexpr int64_t CHUNK = 16, CHUNK_BYTES = 16 << 10;
constexpr int64_t AHEAD = 16;  // tokens between what is computed and what is sent for
constexpr int64_t FEW_VECTORS = 32;   // heads of a group times rows, up to which context is split
// Scratch of a part that several requests share, at most.
constexpr int64_t SHARED_BYTES = 256 << 10;
constexpr int64_t TILE_KEYS = 128;  // keys against which many rows are multiplied at once
// Heads of a group times rows for which a tile is made ready, at most, and numbers of their heads.
constexpr int64_t TILE_VECTORS = 768, TILE_NUMBERS = 3 << 14;
constexpr int64_t MIN_TILE_VECTORS = 24;
constexpr int64_t BLOCK_ROWS = VECTOR_BYTES == 64 ? 12 : 6;  // of a block of accumulators
constexpr int64_t SCORED_VECTORS = 4 * BLOCK_ROWS;  // of a tile, whose scores there are at a time
constexpr int64_t WORTH_A_COPY = 1 << 18;  // numbers for which another thread is woken

inline int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
// The number of threads, of `threads`, that have so many products each; one at least.
inline int64_t threads_for(int64_t products, int64_t worth_a_thread, int64_t threads) {
    return at_least(1, at_most(threads, products / at_least(1, worth_a_thread)));
}

// One request's rows and what they see.
struct Request {
    int64_t first_row, rows, length;

    int64_t position(int64_t row) const { return length - rows + row; }
    // The keys of a row are `first_key` ... `end_key - 1`; none for a position below 0.
    int64_t first_key(int64_t row, int64_t window) const {
        return window ? at_least(position(row) - window + 1, 0) : 0;
    }
    int64_t end_key(int64_t row) const { return at_least(position(row) + 1, 0); }
};

inline Request request_of(const Step &step, int64_t index) {
    Request request;
    request.first_row = step.query_starts ? step.query_starts[index] : index;
    request.rows = step.query_starts ? step.query_starts[index + 1] - request.first_row : 1;
    request.length = step.seq_lens[index];
    return request;
}

inline bool has_few_rows(const Step &step, const Request &request) {
    return request.rows == 1 || request.rows * (step.heads / step.kv_heads) <= FEW_VECTORS;
}

template <class E> inline const E *block_of(const Step &step, const void *plane, int64_t request,
                                            int64_t token) {
    int64_t id = step.tables[request * step.table_stride + token / step.block_size];
    return (const E *)plane + id * step.block_stride;
}

template <class E, class A> inline void give(const A *from, A total, int64_t dim, E *to) {
    A share = total == 0 ? A(0) : 1 / total;
    for (int64_t d = 0; d < dim; d += LANES<A>) narrow_vector(load(from + d) * share, to + d);
}

template <class E> inline E *out_of(const Step &step, const Request &request, int64_t head,
                                    int64_t vector) {
    const int64_t group = step.heads / step.kv_heads;
    return (E *)step.out + (request.first_row + vector / group) * step.out_row +
           (head * group + vector % group) * step.out_head;
}

}  // namespace
