// SPDX-License-Identifier: Apache-2.0
// The functions of the library, which `library.py` calls. This file runs on any processor; the
// variants do the work.
#include <cpuid.h>
#include <time.h>

#include "step.h"

extern const Variant stratakv_avx2;
extern const Variant stratakv_avx512;
extern const Variant stratakv_avx512_bf16;

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int64_t stratakv_cpu_abi() { return STRATAKV_ABI; }
EXPORTED int64_t stratakv_cpu_step_bytes() { return sizeof(Step); }
EXPORTED int64_t stratakv_cpu_pass_bytes() {
    return sizeof(Adapter) + sizeof(Product) + sizeof(Experts) + sizeof(LayerWeights) + sizeof(Pass);
}

static bool has_half_conversion() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

// Whether this processor, and the system with it, runs a variant: 0 AVX2, 1 AVX-512, 2 AVX-512 that
// multiplies bfloat16.
EXPORTED int64_t stratakv_cpu_runs(int64_t variant) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !has_half_conversion())
        return 0;
    if (variant == 0) return 1;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           (variant == 1 || __builtin_cpu_supports("avx512bf16"));
}

// The last variant has bfloat16 alone: other elements are AVX-512's.
static const Variant &variant_of(int64_t variant, int64_t element) {
    if (variant == 0) return stratakv_avx2;
    return variant == 2 && element == BFLOAT16 ? stratakv_avx512_bf16 : stratakv_avx512;
}

// Bytes that a call with this step needs; of q, k, v, out and the pool nothing is read.
EXPORTED int64_t stratakv_cpu_workspace(int64_t variant, const Step *step, int64_t threads) {
    return variant_of(variant, step->element).workspace_bytes(step, threads);
}

// Outputs of a panel; a matrix of this element lies in whole ones.
EXPORTED int64_t stratakv_cpu_panel(int64_t variant, int64_t element) {
    return variant_of(variant, element).panel(element);
}

// Inputs of an output that lie side by side in a matrix of this element, which has a multiple of so
// many of them, with zeros at the end.
EXPORTED int64_t stratakv_cpu_together(int64_t variant, int64_t element) {
    return variant_of(variant, element).together(element);
}

// Lays down `weight`, whose rows are `row` elements apart, where `matrix` says; it is the first
// (offset 0) or the second (1) of a pair.
EXPORTED int64_t stratakv_cpu_pack(int64_t variant, const void *weight, int64_t row,
                                   const Matrix *matrix, int64_t offset, int64_t element) {
    variant_of(variant, element).pack(weight, row, matrix, offset, element);
    return 0;
}

EXPORTED int64_t stratakv_cpu_product_workspace(int64_t variant, const Product *product,
                                                int64_t threads) {
    return variant_of(variant, product->element).product_bytes(product, threads);
}

// 0, or 1 where the workspace is too small; then nothing was done.
EXPORTED int64_t stratakv_cpu_multiply(int64_t variant, const Product *product, Parallel parallel,
                                       int64_t threads) {
    const Variant &chosen = variant_of(variant, product->element);
    if (chosen.product_bytes(product, threads) > product->workspace_bytes) return 1;
    if (product->rows > 0) chosen.multiply(product, parallel, threads);
    return 0;
}

EXPORTED int64_t stratakv_cpu_pass_workspace(int64_t variant, const Pass *pass, int64_t threads) {
    return variant_of(variant, pass->element).pass_bytes(pass, threads);
}

// All layers. 0, or why nothing was done: 1 the workspace is too small, 2 a position has no place in
// the tables, 3 a wanted row is none of the tokens. What the steps point to was checked before.
EXPORTED int64_t stratakv_cpu_pass(int64_t variant, const Pass *pass, Parallel parallel,
                                   int64_t threads) {
    const Variant &chosen = variant_of(variant, pass->element);
    if (chosen.pass_bytes(pass, threads) > pass->workspace_bytes) return 1;
    for (int64_t i = 0; i < pass->num_tokens; i++)
        if (pass->positions[i] < 0 || pass->positions[i] >= pass->num_positions) return 2;
    if (pass->wanted)
        for (int64_t i = 0; i < pass->num_wanted; i++)
            if (pass->wanted[i] < 0 || pass->wanted[i] >= pass->num_tokens) return 3;
    if (pass->last_step) {
        const int64_t count = pass->last_step->num_tokens;
        for (int64_t i = 0; i < count; i++)
            if (pass->last_rows[i] < 0 || pass->last_rows[i] >= pass->num_tokens) return 3;
        for (int64_t i = 0; i < pass->num_wanted; i++)
            if (pass->last_wanted[i] < 0 || pass->last_wanted[i] >= count) return 3;
    }
    chosen.pass(pass, parallel, threads);
    return 0;
}

// 0, or what is out of bounds: 1 a slot, 2 a block, 3 a length that its table does not hold,
// 4 rows of a request.
EXPORTED int64_t stratakv_cpu_check(const Step *step) {
    if (step->k)
        for (int64_t i = 0; i < step->num_tokens; i++)
            if (step->slots[i] < -1 || step->slots[i] >= step->num_blocks * step->block_size)
                return 1;
    for (int64_t i = 0; i < step->num_requests; i++) {
        const int64_t length = step->seq_lens[i];
        const int64_t used =
            length > 0 ? (length + step->block_size - 1) / step->block_size : 0;
        if (used > step->table_stride) return 3;
        const int32_t *table = step->tables + i * step->table_stride;
        int32_t wrong = 0;
        for (int64_t b = 0; b < used; b++)
            wrong |= table[b] < 0 || table[b] >= step->num_blocks;
        if (wrong) return 2;
        if (step->query_starts) {
            const int64_t first = step->query_starts[i], end = step->query_starts[i + 1];
            if (first < 0 || end < first || end > step->num_tokens) return 4;
        } else if (i >= step->num_tokens) {
            return 4;
        }
    }
    return 0;
}

// Writes k and v into their slots, unless k is null, then attends. 0, or 1 where the workspace is
// too small; then nothing was done.
EXPORTED int64_t stratakv_cpu_attend(int64_t variant, const Step *step, Parallel parallel,
                                     int64_t threads) {
    const Variant &chosen = variant_of(variant, step->element);
    if (step->num_requests && chosen.workspace_bytes(step, threads) > step->workspace_bytes)
        return 1;
    if (step->k) chosen.write(step, parallel, threads);
    if (step->num_requests) chosen.attend(step, parallel, threads);
    return 0;
}

// Bans tokens in place, as -inf: of row `indices[i]` of `logits` (row i where there are none), whose
// rows are `row` elements apart, each token whose bit is not set in the i-th row of `words`, and
// those beyond the words. Whole words of one kind are most of a grammar's.
EXPORTED int64_t stratakv_cpu_ban(float *logits, int64_t row, int64_t num_tokens,
                                  const uint32_t *words, int64_t num_words,
                                  const int64_t *indices, int64_t num_rows) {
    const float banned = -__builtin_inff();
    for (int64_t i = 0; i < num_rows; i++, words += num_words) {
        float *at = logits + (indices ? indices[i] : i) * row;
        for (int64_t first = 0; first < num_tokens; first += 32) {
            const int64_t word = first / 32;
            const uint32_t allowed = word < num_words ? words[word] : 0;
            if (allowed == ~uint32_t(0)) continue;
            const int64_t count = num_tokens - first < 32 ? num_tokens - first : 32;
            if (allowed == 0)
                for (int64_t t = 0; t < count; t++) at[first + t] = banned;
            else
                for (int64_t t = 0; t < count; t++)
                    if (!(allowed >> t & 1)) at[first + t] = banned;
        }
    }
    return 0;
}

// Has the system give each page of zeros that it has promised, from `memory` on, until `*ends` is
// not 0. Nothing is changed: what another thread writes there meanwhile stays. A page is taken by
// touching it, which holds up no other thread; `madvise` would keep those waiting that map memory.
EXPORTED int64_t stratakv_cpu_take_pages(char *memory, int64_t bytes, const int64_t *ends) {
    constexpr int64_t PAGE = 4096;
    for (int64_t at = 0; at < bytes && !__atomic_load_n(ends, __ATOMIC_RELAXED); at += PAGE)
        __asm__ volatile("lock orb $0, %0" : "+m"(memory[at]));
    return 0;
}

static int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t(1000000000) + now.tv_nsec;
}

static void arrive(void *data) {
    int64_t *last = (int64_t *)data;
    const int64_t now = nanoseconds();
    int64_t before = __atomic_load_n(last, __ATOMIC_RELAXED);
    while (before < now && !__atomic_compare_exchange_n(last, &before, now, false,
                                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

// Nanoseconds from the call until the last of the threads has come; 0 where there is but one.
EXPORTED int64_t stratakv_cpu_wake(int64_t, const void *, Parallel parallel, int64_t threads) {
    if (!parallel || threads < 2) return 0;
    const int64_t called = nanoseconds();
    int64_t last = called;
    parallel(arrive, &last, unsigned(threads), 0);
    return last - called;
}
