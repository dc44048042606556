// SPDX-License-Identifier: Apache-2.0
// The tasks into which a call of attention is divided, and the layout of the workspace.
//
//     few rows   a task is a part of a request's context, for all heads. Requests that have the
//                same blocks in a part, such as a common system prompt, are one task: keys and
//                values are read once for all requests. The block ids decide which requests
//                share a prefix; a step may have several shared prefixes
//     many rows  a task is some rows of a request under one kv head
//
// A request's result does not depend, in any bit, on other requests of a task: each sum is always
// computed in the same order.
#pragma once

#include "tiles.h"

namespace {

// The sizes of a part's queries, scores, sums and results; `vectors` is rows times heads.
template <class A> struct PartScratch {
    int64_t vectors, dim;

    int64_t of_rows() const { return vectors * dim; }
    int64_t of_scores() const { return vectors * SPLIT; }
    int64_t of_sums() const { return round_up(vectors, LANES<A>) + SPARE<A>; }
    int64_t bytes() const {
        return (2 * of_rows() + of_scores() + 3 * of_sums()) * int64_t(sizeof(A)) +
               (2 * SPLIT + AHEAD) * int64_t(sizeof(void *));
    }
    static constexpr int64_t bytes_of_a_vector(int64_t dim) {
        return (2 * dim + SPLIT + 3) * int64_t(sizeof(A));
    }
};

// One request's share of a task: a part of its context, or a tile of its rows under one kv head.
struct Member {
    int32_t request;
    int32_t number;  // index of the part, or of the tile and kv head, in this request
    int32_t next;    // the next member of the same task; -1: none
    int32_t task;
};

struct Task {
    int32_t first, last;  // the first and the last member
    int64_t vectors;      // rows times heads, of all members
};

struct Layout {
    Task *tasks;
    Member *members;        // the members of a request are adjacent
    int32_t *first_member;  // [requests + 1]
    int32_t *remaining;     // [requests]: the number of parts that are not finished
    int64_t *first_partial; // [requests]: the offset of the request's partial results
    int64_t num_tasks;
    char *partials;
    char *scratch;
    int64_t scratch_bytes;  // of one thread
    int64_t tile_rows;
    int64_t shared_vectors;  // the most rows times heads of a task with several requests
    int64_t threads;
    int64_t bytes;

    bool has_tiles;

    // The longest tasks run first: the last rows of a prompt, or parts that many requests share.
    int64_t task_in_turn(int64_t turn) const { return has_tiles ? num_tasks - 1 - turn : turn; }
    int64_t parts(int64_t request) const {
        return first_member[request + 1] - first_member[request];
    }
};

inline int64_t first_part(const Step &step, const Request &request) {
    return request.first_key(0, step.window) / SPLIT;
}
inline int64_t num_parts(const Step &step, const Request &request) {
    if (request.length <= 0) return 1;  // its task writes zeros
    return round_up(request.length, SPLIT) / SPLIT - first_part(step, request);
}

// Returns the number of parts, for a request with few rows, or of tiles times kv heads.
inline int64_t members_of(const Step &step, const Request &request, int64_t tile_rows) {
    if (request.rows <= 0) return 0;
    if (has_few_rows(step, request)) return num_parts(step, request);
    return round_up(request.rows, tile_rows) / tile_rows * step.kv_heads;
}
// Returns the number of elements in the partial results; a single part has none.
inline int64_t partials_of(const Step &step, const Request &request, int64_t parts) {
    return parts > 1 ? parts * request.rows * step.heads * (step.head_dim + 2) : 0;
}

// Whether every row sees all keys of a part.
inline bool sees_whole(const Step &step, const Request &request, int64_t part) {
    return request.first_key(request.rows - 1, step.window) <= part * SPLIT &&
           request.end_key(0) >= (part + 1) * SPLIT;
}

inline bool has_same_blocks(const Step &step, int64_t a, int64_t b, int64_t part) {
    const int64_t first = part * SPLIT / step.block_size;
    const int64_t end = round_up((part + 1) * SPLIT, step.block_size) / step.block_size;
    return !__builtin_memcmp(step.tables + a * step.table_stride + first,
                             step.tables + b * step.table_stride + first,
                             size_t(end - first) * sizeof(int32_t));
}

// Returns the task of other requests that a part joins, or -1. Requests that share a part also
// share all earlier parts. So the first part is compared with the first part of every request, and
// a later part only with members of the task of the part before.
inline int64_t task_to_join(const Step &step, const Layout &layout, int64_t index,
                            const Request &request, int64_t number) {
    const int64_t part = first_part(step, request) + number;
    if (!sees_whole(step, request, part)) return -1;
    const auto joins = [&](const Member &other) {
        return layout.tasks[other.task].vectors + request.rows * step.heads <=
                   layout.shared_vectors &&
               sees_whole(step, request_of(step, other.request), part) &&
               has_same_blocks(step, index, other.request, part);
    };
    const Member *own = layout.members + layout.first_member[index];
    if (number > 0) {
        int32_t at = layout.tasks[own[number - 1].task].first;
        for (; layout.members[at].request != index; at = layout.members[at].next) {
            const Member *other = layout.members + at;
            if (other->number + 1 < layout.parts(other->request) && joins(other[1]))
                return other[1].task;
        }
        return -1;
    }
    const int32_t *table = step.tables + part * SPLIT / step.block_size;
    for (int64_t i = 0; i < index; i++) {
        if (table[i * step.table_stride] != table[index * step.table_stride]) continue;
        const Request there = request_of(step, i);
        if (there.rows <= 0 || !has_few_rows(step, there) || first_part(step, there) != part)
            continue;
        const Member &other = layout.members[layout.first_member[i]];
        if (layout.tasks[other.task].first == layout.first_member[i] && joins(other))
            return other.task;
    }
    return -1;
}

inline void lay_tasks(const Step &step, Layout &layout) {
    int64_t members = 0, partials = 0;
    layout.num_tasks = 0;
    for (int64_t i = 0; i < step.num_requests; i++) {
        const Request request = request_of(step, i);
        const bool is_few = has_few_rows(step, request);
        const int64_t here = members_of(step, request, layout.tile_rows);
        layout.first_member[i] = int32_t(members);
        layout.first_member[i + 1] = int32_t(members + here);
        layout.first_partial[i] = partials;
        layout.remaining[i] = int32_t(here);
        for (int64_t number = 0; number < here; number++) {
            const int32_t at = int32_t(members + number);
            int64_t joined = is_few ? task_to_join(step, layout, i, request, number) : -1;
            if (joined < 0) {
                joined = layout.num_tasks++;
                layout.tasks[joined] = {at, at, 0};
            } else {
                layout.members[layout.tasks[joined].last].next = at;
            }
            Task &task = layout.tasks[joined];
            task.last = at;
            task.vectors += request.rows * step.heads;
            layout.members[at] = {int32_t(i), int32_t(number), -1, int32_t(joined)};
        }
        members += here;
        if (is_few) partials += partials_of(step, request, here);
    }
}

// Computes the layout, and writes the tasks to the memory at `base`, unless it is null. With
// `is_crew`, all `threads` are used, because these threads already run.
template <class A>
Layout lay_out(const Step &step, int64_t threads, char *base, bool is_crew = false) {
    Layout layout;
    const int64_t group = step.heads / step.kv_heads, dim = step.head_dim;
    int64_t products = 0, tiled_rows = 0, few_vectors = 0, few_requests = 0, all_vectors = 0;
    for (int64_t i = 0; i < step.num_requests; i++) {
        Request request = request_of(step, i);
        if (request.rows <= 0) continue;
        products += request.rows * request.length * step.heads * dim;
        if (has_few_rows(step, request)) {
            few_requests++;
            few_vectors = at_least(few_vectors, request.rows * step.heads);
            all_vectors += request.rows * step.heads * num_parts(step, request);
        } else {
            tiled_rows += request.rows;
        }
    }
    layout.threads = is_crew ? threads : threads_for(products, step.worth_a_thread, threads);
    const int64_t most = at_most(TILE_VECTORS, TILE_NUMBERS / dim);
    int64_t rows = at_least(most / group, 1);
    while (rows * group > MIN_TILE_VECTORS && rows > 1 &&
           tiled_rows / rows * step.kv_heads < 3 * layout.threads)
        rows = (rows + 1) / 2;
    layout.tile_rows = rows;
    layout.has_tiles = tiled_rows > 0;
    layout.shared_vectors = SHARED_BYTES / PartScratch<A>::bytes_of_a_vector(dim);
    if (layout.threads > 1)
        layout.shared_vectors = at_most(layout.shared_vectors, all_vectors / (3 * layout.threads));
    if (few_requests > 1) few_vectors = at_least(few_vectors, layout.shared_vectors);

    int64_t members = 0, partials = 0;
    for (int64_t i = 0; i < step.num_requests; i++) {
        const Request request = request_of(step, i);
        const int64_t here = members_of(step, request, rows);
        members += here;
        if (has_few_rows(step, request)) partials += partials_of(step, request, here);
    }
    const int64_t requests = step.num_requests;
    layout.tasks = (Task *)base;
    layout.members = (Member *)(layout.tasks + members);
    layout.first_partial = (int64_t *)(layout.members + members);
    layout.first_member = (int32_t *)(layout.first_partial + requests);
    layout.remaining = layout.first_member + requests + 1;
    const int64_t bookkeeping = round_up(members * int64_t(sizeof(Task) + sizeof(Member)) +
                                             requests * 16 + 4, 64);
    const int64_t few = few_vectors ? PartScratch<A>{few_vectors, dim}.bytes() : 0;
    const int64_t many = tiled_rows ? TileScratch<A>{rows * group, dim}.bytes() : 0;
    layout.scratch_bytes = round_up(at_least(few, many), 64) + 64;
    layout.partials = base + bookkeeping;
    layout.scratch = layout.partials + round_up(partials * int64_t(sizeof(A)), 64);
    layout.bytes = bookkeeping + round_up(partials * int64_t(sizeof(A)), 64) +
                   layout.threads * layout.scratch_bytes;
    if (base) lay_tasks(step, layout);
    return layout;
}

}  // namespace
