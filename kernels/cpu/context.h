// SPDX-License-Identifier: Apache-2.0
// Definitions for attention of few rows (parts.h) and of many rows (tiles.h): sizes, a request's
// rows and keys, the address of a result.
#pragma once

#include "step.h"
#include "vectors.h"

namespace {

constexpr int64_t SPLIT = 256;        // tokens in a part of a context
// Values are read in chunks of tokens: every head adds a chunk's values before the next chunk is
// read. A chunk has CHUNK_BYTES, but 4 to CHUNK tokens; a smaller chunk is read closer to memory
// order.
constexpr int64_t CHUNK = 16, CHUNK_BYTES = 16 << 10;
constexpr int64_t AHEAD = 16;  // tokens from the token in work to the token that is prefetched
constexpr int64_t FEW_VECTORS = 32;   // the most rows times group heads with split contexts
// The largest scratch memory of a part that several requests share.
constexpr int64_t SHARED_BYTES = 256 << 10;
constexpr int64_t TILE_KEYS = 128;  // keys in a tile, by which many rows are multiplied
// The most rows times heads of a group per tile, and the most elements of their queries.
constexpr int64_t TILE_VECTORS = 768, TILE_NUMBERS = 3 << 14;
constexpr int64_t MIN_TILE_VECTORS = 24;
constexpr int64_t BLOCK_ROWS = VECTOR_BYTES == 64 ? 12 : 6;  // rows in a block of accumulators
constexpr int64_t SCORED_VECTORS = 4 * BLOCK_ROWS;  // rows times heads scored at a time
constexpr int64_t WORTH_A_COPY = 1 << 18;  // the least elements of a KV write with several threads

inline int64_t quotient_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
inline int64_t at_least(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
// Returns how many of `threads` threads have at least `worth_a_thread` products each; at least 1.
inline int64_t threads_for(int64_t products, int64_t worth_a_thread, int64_t threads) {
    return at_least(1, at_most(threads, products / at_least(1, worth_a_thread)));
}

// The rows of one request, and the keys that each row sees.
struct Request {
    int64_t first_row, rows, length;

    int64_t position(int64_t row) const { return length - rows + row; }
    // The keys that a row sees are `first_key` ... `end_key - 1`; a position below 0 sees no key.
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
