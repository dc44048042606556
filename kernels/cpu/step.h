// SPDX-License-Identifier: Apache-2.0
// The C structures of the library's arguments. The ctypes structures in `library.py` have the same
// fields.
#pragma once

#include <stdint.h>

// The version of the structures and functions, raised with every change; `library.py` refuses a
// library of another version.
#define STRATAKV_ABI 10

enum ElementType { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

// The arguments of an attention step. Strides are in elements; the last axis of each tensor is
// contiguous.
struct Step {
    const void *q;  // [tokens, heads, head_dim]
    void *out;      // the shape of q
    const void *k;  // [tokens, kv_heads, head_dim]: new keys; null: none are written
    const void *v;
    const int64_t *slots;  // [tokens]: slots of the new keys and values; -1: not written
    void *keys;            // the layer's pool: [num_blocks, block_size, kv_heads, head_dim]
    void *values;
    const int32_t *tables;        // [requests, table_stride]: ids of blocks
    const int32_t *seq_lens;      // [requests]: tokens, new tokens included
    const int32_t *query_starts;  // [requests + 1]: first rows in q; null: request i has row i
    void *workspace;
    int64_t workspace_bytes;
    int64_t num_tokens;
    int64_t num_requests;
    int64_t table_stride;
    int64_t q_row, q_head;
    int64_t out_row, out_head;
    int64_t k_row, k_head;
    int64_t v_row, v_head;
    int64_t block_stride, token_stride, head_stride;  // strides of keys and of values
    int64_t num_blocks, block_size;
    int64_t heads, kv_heads, head_dim;
    int64_t window;   // tokens that a position sees, itself included; 0: all
    double scale;     // of scores
    double softcap;   // c: a score s becomes c * tanh(s / c); 0: scores do not change
    int64_t element;  // ElementType of q, out, k, v and the pool
    int64_t worth_a_thread;  // the least number of products per thread
};

// OpenMP's GOMP_parallel: calls `work(data)` on up to `threads` threads, and returns when all calls
// have.
typedef void (*Parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

// A LoRA adapter of one matrix, which adds x times `in` times `out` to a product. `in` and `out`
// have the type of the sums.
struct Adapter {
    const void *in;        // [rank, ins], multiplied by the adapter's scaling factor
    const void *out;       // [panels, rank, PANEL], packed like the matrix
    const int32_t *spans;  // [panels, 2]: first and end rank outside of which a panel is 0
    int64_t rank;          // a multiple of 4; 0: nothing is added
};

// A matrix, packed as in `matrix.h`. Weights have the network's element type; biases have the type
// of the sums.
struct Matrix {
    const void *packed;
    const void *bias;  // padded and ordered like the panels; null: no bias
    int64_t ins, outs;
    int64_t is_pair;  // two matrices of this size, with alternating panels
    const struct Adapter *adapters;  // adapters by slot; null: no adapters
};

// The arguments of a single product: out `[rows, outs]` from x `[rows, ins]`, both of `element`,
// unless `is_wide`.
struct Product {
    const void *x;
    void *out;
    void *workspace;
    int64_t workspace_bytes;
    int64_t rows, x_row, out_row;
    int64_t activation;  // of a pair: 0 SiLU, 1 GELU with tanh
    int64_t element;
    int64_t is_wide;  // no pair: out has the type of the sums, with values rounded to `element`
    // A bit for each output of a matrix that is no pair: panels without a set bit are neither
    // computed nor written. Outputs beyond the words have no set bit. Null: all outputs are
    // computed.
    const uint32_t *wanted;
    int64_t wanted_words;
    int64_t worth_a_thread;  // as in Step, but four rows count as one; also in Pass
    const int32_t *slots;    // [rows]: adapter slots, -1: no adapter; null: no row has an adapter
    int64_t most_rank;       // the largest rank of the matrix's adapters
    struct Matrix matrix;
};

// A mixture of experts: for each row the experts with the highest router scores, weighted by the
// softmax of the scores.
struct Experts {
    struct Matrix router;           // [experts, hidden], and an output for the shared expert's gate
    const struct Matrix *gate_ups;  // [experts], pairs
    const struct Matrix *downs;     // [experts]
    int64_t num_experts, num_chosen;
    int64_t normalises;  // whether the weights of the chosen experts are divided by their sum
    int64_t has_shared;  // whether all rows also have the layer's shared expert
    int64_t number;      // the layer's index among the layers with experts
};

// The weights of a layer. Norms have the type of the sums; a norm that is null is not computed.
struct LayerWeights {
    struct Matrix qkv;      // queries of all heads, then keys, then values
    struct Matrix out;
    struct Matrix gate_up;  // a pair; in a layer with experts, the shared expert's
    struct Matrix down;
    const struct Experts *experts;     // null: a layer without experts
    const void *attention_norm;        // [hidden]
    const void *head_norms;            // [heads + kv_heads, head_dim]
    const void *after_attention_norm;  // [hidden]
    const void *mlp_norm;              // [hidden]
    const void *after_mlp_norm;        // [hidden]
    const void *cos, *sin;             // [positions, head_dim / 2], elements
    void *keys, *values;               // the layer's pool, as in Step
    int64_t view;                      // index of the layer's step in `Pass.steps`
};

// The arguments of a forward pass through all layers.
struct Pass {
    const struct LayerWeights *layers;
    const struct Step *steps;      // one for each view; their tensors of a layer are not used
    const void *x;                 // [tokens, hidden], elements: embeddings
    void *result;                  // [wanted, hidden], elements: the normed hidden states
    const int64_t *positions;      // [tokens]
    const int64_t *wanted;         // [num_wanted]: rows; null: all rows, in order
    // In the last layer, attention is computed for `last_rows` only, and keys and values for all
    // rows; null: attention for all rows. With `last_step`, the queries must end at the end of a
    // panel.
    const struct Step *last_step;  // the step of the last layer's view, for `last_rows`
    const int64_t *last_rows;      // [last_step->num_tokens]: indices of the rows among the tokens
    const int64_t *last_wanted;    // [num_wanted]: index of each wanted row in `last_rows`
    void *const *states;           // [layers + 1], each null or as x, for the hidden states that go
                                   // into a layer, and of the wanted rows into the last norm
    // [layers with experts, chosen_row, most_chosen]: the experts of each row, the best first, are
    // written here, unless it is null.
    int32_t *chosen;
    int64_t chosen_row;
    const int32_t *slots;          // [tokens]: adapter slots, -1: no adapter; null: no adapters
    const void *last_norm;         // [hidden]
    void *workspace;
    int64_t workspace_bytes;
    int64_t num_layers, num_views, num_tokens, num_wanted, num_positions;
    int64_t hidden, intermediate;  // `intermediate` is even, and the largest of all layers
    int64_t heads, kv_heads, head_dim;
    int64_t most_experts, most_chosen, expert_size;  // the largest of all layers; 0: no experts
    int64_t most_rank;   // the largest rank of all adapters
    int64_t activation;  // 0 SiLU, 1 GELU with tanh
    int64_t element;
    int64_t worth_a_thread;
    double eps;
};

// The functions of a variant; there is a variant for each kind of processor.
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
