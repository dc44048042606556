// SPDX-License-Identifier: Apache-2.0
// The exported functions, which `library.py` calls. This file is compiled for every x86-64
// processor; the computations are in the variants.
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

// Whether the processor and the operating system support a variant: 0 AVX2, 1 AVX-512, 2 AVX-512
// with products of bfloat16.
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

// The bfloat16 variant computes only bfloat16; the AVX-512 variant computes the other element
// types.
static const Variant &variant_of(int64_t variant, int64_t element) {
    if (variant == 0) return stratakv_avx2;
    return variant == 2 && element == BFLOAT16 ? stratakv_avx512_bf16 : stratakv_avx512;
}

// Returns the bytes of workspace for `step`; the memory of q, k, v, out and the pool is not read.
EXPORTED int64_t stratakv_cpu_workspace(int64_t variant, const Step *step, int64_t threads) {
    return variant_of(variant, step->element).workspace_bytes(step, threads);
}

// Returns the number of outputs in a panel; a matrix is packed in whole panels.
EXPORTED int64_t stratakv_cpu_panel(int64_t variant, int64_t element) {
    return variant_of(variant, element).panel(element);
}

// Returns how many inputs of an output are adjacent in a packed matrix; the number of inputs is
// padded with zeros to a multiple of it.
EXPORTED int64_t stratakv_cpu_together(int64_t variant, int64_t element) {
    return variant_of(variant, element).together(element);
}

// Packs `weight`, whose rows are `row` elements apart, into `matrix`. In a pair, `weight` is the
// first matrix (offset 0) or the second (offset 1).
EXPORTED int64_t stratakv_cpu_pack(int64_t variant, const void *weight, int64_t row,
                                   const Matrix *matrix, int64_t offset, int64_t element) {
    variant_of(variant, element).pack(weight, row, matrix, offset, element);
    return 0;
}

EXPORTED int64_t stratakv_cpu_product_workspace(int64_t variant, const Product *product,
                                                int64_t threads) {
    return variant_of(variant, product->element).product_bytes(product, threads);
}

// Computes a product. Returns 0, or 1 without computing if the workspace is too small.
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

// Computes all layers. Returns 0, or why nothing was computed: 1 the workspace is too small, 2 a
// position is beyond the tables, 3 a wanted row is no row of the tokens. The steps must have been
// checked.
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

// Returns 0, or what is out of bounds: 1 a slot, 2 a block, 3 a length beyond its block table, 4
// the rows of a request.
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

// Writes k and v to their slots, unless k is null, and computes attention. Returns 0, or 1 without
// computing if the workspace is too small.
EXPORTED int64_t stratakv_cpu_attend(int64_t variant, const Step *step, Parallel parallel,
                                     int64_t threads) {
    const Variant &chosen = variant_of(variant, step->element);
    if (step->num_requests && chosen.workspace_bytes(step, threads) > step->workspace_bytes)
        return 1;
    if (step->k) chosen.write(step, parallel, threads);
    if (step->num_requests) chosen.attend(step, parallel, threads);
    return 0;
}

// Sets logits to -inf: in row `indices[i]` of `logits` (row i if `indices` is null), each token
// whose bit is 0 in the i-th row of `words`, and each token beyond the words. Rows of logits are
// `row` elements apart. Words of only ones or only zeros, the most frequent in grammars, take a
// fast path.
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

// Touches each page from `memory` on, so that the system allocates it, until `*ends` is not 0. The
// bytes do not change, and other threads may write to the pages. A touch delays no other thread,
// while `madvise` would delay threads that map memory.
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

// Returns the nanoseconds from the call until all threads run; 0 for one thread.
EXPORTED int64_t stratakv_cpu_wake(int64_t, const void *, Parallel parallel, int64_t threads) {
    if (!parallel || threads < 2) return 0;
    const int64_t called = nanoseconds();
    int64_t last = called;
    parallel(arrive, &last, unsigned(threads), 0);
    return last - called;
}
