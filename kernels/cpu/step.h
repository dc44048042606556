// SPDX-License-Identifier: Apache-2.0
// What a call of the library is given, for both sides of it: `library.py` has the same fields.
#pragma once

#include <stdint.h>

// Grows with every change of `Step` or of a function's meaning; a library of another number is not
// used.
#define STRATAKV_ABI 10

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
    int64_t worth_a_thread;  // products for each thread, from which on another one is woken
};

// A team of OpenMP: calls `work(data)` on up to `threads` threads and returns when all have.
typedef void (*Parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

// What an adapter adds to a product: x times `in`, times `out`. Both are of what is added up in.
struct Adapter {
    const void *in;        // [rank, ins], times the adapter's factor
    const void *out;       // [panels, rank, PANEL], in the order of the matrix's panels
    const int32_t *spans;  // [panels, 2]: the ranks from and to which a panel's numbers are not all 0
    int64_t rank;          // a multiple of 4; 0: nothing is added
};

// A matrix in the order of `matrix.h`. Its numbers are of the network's elements, biases of what
// those are added up in.
struct Matrix {
    const void *packed;
    const void *bias;  // padded to whole panels, in their order; null: none
    int64_t ins, outs;
    int64_t is_pair;  // two matrices of this size in turns
    const struct Adapter *adapters;  // by slot; null: it takes none
};

// A product by itself: out `[rows, outs]` of x `[rows, ins]`, both of elements unless `is_wide`.
struct Product {
    const void *x;
    void *out;
    void *workspace;
    int64_t workspace_bytes;
    int64_t rows, x_row, out_row;
    int64_t activation;  // of a pair: 0 SiLU, 1 GELU by tanh
    int64_t element;
    int64_t is_wide;  // of one matrix: out is of what is added up in, its numbers rounded to elements
    // A bit for each output, of one matrix: panels without any are left out, and nothing is written
    // for their outputs. Outputs beyond the words have none. Null: all are computed.
    const uint32_t *wanted;
    int64_t wanted_words;
    int64_t worth_a_thread;  // as in a Step; four rows count as one, and the same below
    const int32_t *slots;    // [rows]: the slots of their adapters, -1: none; null: none has any
    int64_t most_rank;       // of the matrix's adapters
    struct Matrix matrix;
};

// A mixture of experts: of each row the best by the router's scores, weighed by their softmax.
struct Experts {
    struct Matrix router;           // [experts, hidden], and a last output: the shared expert's gate
    const struct Matrix *gate_ups;  // [experts], pairs
    const struct Matrix *downs;     // [experts]
    int64_t num_experts, num_chosen;
    int64_t normalises;  // whether the weights of the chosen are divided by their sum
    int64_t has_shared;  // whether every row has one more, the layer's `gate_up` and `down`
    int64_t number;      // among the layers with experts
};

// Norms are of what elements are added up in; those that are null are not computed.
struct LayerWeights {
    struct Matrix qkv;      // queries of all heads, then keys, then values
    struct Matrix out;
    struct Matrix gate_up;  // a pair; of a layer with experts the shared one's, if it has one
    struct Matrix down;
    const struct Experts *experts;     // null: the layer has none
    const void *attention_norm;        // [hidden]
    const void *head_norms;            // [heads + kv_heads, head_dim]
    const void *after_attention_norm;  // [hidden]
    const void *mlp_norm;              // [hidden]
    const void *after_mlp_norm;        // [hidden]
    const void *cos, *sin;             // [positions, head_dim / 2], elements
    void *keys, *values;               // of this layer, as in a Step
    int64_t view;                      // which of the steps it attends by
};

// A forward pass through all layers.
struct Pass {
    const struct LayerWeights *layers;
    const struct Step *steps;      // one for each view; what differs by layer is not looked at
    const void *x;                 // [tokens, hidden], elements: embeddings
    void *result;                  // [wanted, hidden], elements: normed
    const int64_t *positions;      // [tokens]
    const int64_t *wanted;         // [num_wanted] rows; null: all of them, in order
    // Of the last layer only these rows attend, the others have keys and values; null: all of them.
    // Queries then end where a panel does.
    const struct Step *last_step;  // as that of its view, of these rows
    const int64_t *last_rows;      // [last_step->num_tokens], of the tokens
    const int64_t *last_wanted;    // [num_wanted]: where in `last_rows` they are
    void *const *states;           // [layers + 1], each null or as x, for the hidden states that go
                                   // into a layer, and of the wanted rows into the last norm
    // [layers with experts, chosen_row, most_chosen]: the experts of each row of the hidden states,
    // the best first; null: they are not told.
    int32_t *chosen;
    int64_t chosen_row;
    const int32_t *slots;          // [tokens]: of their adapters, -1: none; null: none has any
    const void *last_norm;         // [hidden]
    void *workspace;
    int64_t workspace_bytes;
    int64_t num_layers, num_views, num_tokens, num_wanted, num_positions;
    int64_t hidden, intermediate;  // of layers of several intermediate sizes, all even, the largest
    int64_t heads, kv_heads, head_dim;
    int64_t most_experts, most_chosen, expert_size;  // of all layers; 0: none has experts
    int64_t most_rank;   // of all adapters
    int64_t activation;  // 0 SiLU, 1 GELU by tanh
    int64_t element;
    int64_t worth_a_thread;
    double eps;
};

// One set of functions for each kind of processor.
struct Variant {
    int64_t (*panel)(int64_t element);
    int64_t (*together)(int64_t element);
    void (*pack)(const void *weight, int64_t row, const Matrix *, int64_t offset, int64_t element);
    int64_t (*product_bytes)(const Product *, int64_t threads);
    void (*multiply)(const Product *, Parallel, int64_t threads);
    int64_t (*pass_bytes)(const Pass *, int64_t threads);
    void (*pass)(const Pass *, Parallel, int64_t threads);
    int64_t (*workspace_bytes)(const Step *, int64_t threads);
    void (*write)(const Step *, Parallel, int64_t threads);
    void (*attend)(const Step *, Parallel, int64_t threads);
};
