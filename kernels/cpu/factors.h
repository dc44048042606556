// SPDX-License-Identifier: Apache-2.0
// The factors of attention's products: numbers of the type of the sums or, if the processor has an
// instruction for sums of two bfloat16 products, pairs of bfloat16. A pair of a query or key has
// two elements of a head, a pair of weights or values two tokens.
#pragma once

#include "context.h"

namespace {

template <class A> struct Numbers {
    typedef A Number;
    typedef V<A> Vector;
    static constexpr int DEPTH = 1;  // numbers in one factor

    static inline Vector read(const A *from) { return load(from); }
    static inline Vector everywhere(A number) { return all_of(number); }
    static inline V<A> added(V<A> sum, Vector left, Vector right) { return sum + left * right; }
    template <class E> static inline Vector of_elements(const E *from) { return load(from); }

    // Stores DEPTH vectors of weights, and adds the stored weights to `sum`.
    static inline void keep(const V<A> *weights, A *to, V<A> &sum) {
        store(to, *weights);
        sum += *weights;
    }
    template <class E> static inline void keep_elements(const E *from, int64_t count, A *to) {
        for (int64_t d = 0; d < count; d += LANES<A>) store(to + d, load(from + d));
    }
    // Stores a panel of the values of DEPTH tokens (null: zeros), from element `d` to at most
    // `dim`.
    template <class E>
    static inline void keep_values(const E *const *from, int64_t d, int64_t dim, A *to) {
        for (int64_t end = at_most(d + PANEL<A>, dim); d < end; d += LANES<A>, to += LANES<A>)
            store(to, *from ? load(*from + d) : V<A>{});
    }
};

#ifdef __AVX512BF16__
typedef uint16_t HalfWords __attribute__((vector_size(VECTOR_BYTES)));

struct Pair {
    BFloat16 first, second;
};

struct Pairs {
    typedef Pair Number;
    typedef IntVector Vector;
    static constexpr int DEPTH = 2;

    static inline Vector read(const Pair *from) { return read_as<Vector>(from); }
    static inline Vector everywhere(Pair pair) {
        return (Vector)_mm512_set1_epi32(read_as<int32_t>(&pair));
    }
    static inline FloatVector added(FloatVector sum, Vector left, Vector right) {
        return (FloatVector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
    }
    static inline Vector of_elements(const BFloat16 *from) { return read_as<Vector>(from); }

    static inline void keep(const FloatVector *weights, Pair *to, FloatVector &sum) {
        const Vector pairs =
            (Vector)_mm512_cvtne2ps_pbh((__m512)weights[1], (__m512)weights[0]);
        __builtin_memcpy(to, &pairs, sizeof(pairs));
        sum = added(sum, pairs, (Vector)_mm512_set1_epi16(0x3f80));  // 1 in bfloat16
    }
    static inline void keep_elements(const BFloat16 *from, int64_t count, Pair *to) {
        __builtin_memcpy(to, from, size_t(count) * sizeof(BFloat16));
    }
    static inline void keep_values(const BFloat16 *const *from, int64_t d, int64_t, Pair *to) {
        typedef HalfWords I;
        const I turns = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
        const I left = from[0] ? read_as<I>(from[0] + d) : I{};
        const I right = from[1] ? read_as<I>(from[1] + d) : I{};
        const I first = (I)_mm512_permutex2var_epi16((__m512i)left, (__m512i)turns,
                                                     (__m512i)right);
        const I second = (I)_mm512_permutex2var_epi16((__m512i)left, (__m512i)(turns + 16),
                                                      (__m512i)right);
        __builtin_memcpy(to, &first, sizeof(I));
        __builtin_memcpy(to + LANES<float>, &second, sizeof(I));
    }
};
#endif

template <class E> constexpr bool IS_BFLOAT16 = false;
template <> constexpr bool IS_BFLOAT16<BFloat16> = true;

// Calls `work` with the kind of factors for elements E and heads of `dim` elements.
template <class E, class Work> inline void by_factors(int64_t dim, Work work) {
    (void)dim;
#ifdef __AVX512BF16__
    if constexpr (IS_BFLOAT16<E>)
        if (dim % (2 * LANES<float>) == 0) return work(Pairs());
#endif
    work(Numbers<typename Wide<E>::A>());
}

}  // namespace
