// SPDX-License-Identifier: Apache-2.0
// What a call of the library is given, for both sides of it: `library.py` has the same fields.
#pragma once

#include <stdint.h>

// Grows with every change of `Step` or of a function's meaning; a library of another number is not
// used.
#define STRATAKV_ABI 1

enum ElementType { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

// Strides count elements. The last axis of everything is contiguous.
struct Step {
    const void *q;  // [tokens, heads, head_dim]
    void *out;      // as q
    const void *k;  // [tokens, kv_heads, head_dim], to be written; null: nothing is
    const void *v;
    const int64_t *slots;  // [tokens]; -1: not written
    void *keys;            // of this layer: [num_blocks, block_size, kv_heads, head_dim]
    void *values;
    const int32_t *tables;        // [requests, table_stride]: ids of blocks
    const int32_t *seq_lens;      // [requests]: tokens, the new ones included
    const int32_t *query_starts;  // [requests + 1]: rows of q; null: row i is request i's
    void *workspace;
    int64_t workspace_bytes;
    int64_t num_tokens;
    int64_t num_requests;
    int64_t table_stride;
    int64_t q_row, q_head;
    int64_t out_row, out_head;
    int64_t k_row, k_head;
    int64_t v_row, v_head;
    int64_t block_stride, token_stride, head_stride;  // of keys and of values
    int64_t num_blocks, block_size;
    int64_t heads, kv_heads, head_dim;
    int64_t window;   // tokens that a position sees, itself included; 0: all
    double scale;     // of scores
    double softcap;   // c: a score s becomes c * tanh(s / c); 0: it does not
    int64_t element;  // ElementType of q, out, k, v and the pool
};

// A team of OpenMP: calls `work(data)` on up to `threads` threads and returns when all have.
typedef void (*Parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

// One set of functions for each kind of processor.
struct Variant {
    int64_t (*workspace_bytes)(const Step *, int64_t threads);
    void (*write)(const Step *, Parallel, int64_t threads);
    void (*attend)(const Step *, Parallel, int64_t threads);
};
