// SPDX-License-Identifier: Apache-2.0
// Vectors of VECTOR_BYTES, by the vector extensions of GCC and Clang, so that all variants have the
// same source.
//
// Each variant is compiled for another processor, and the linker keeps one copy of an inline
// function that several files share, perhaps with unsupported instructions. Therefore everything is
// in an unnamed namespace, and no header of the C++ library is included.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

typedef float FloatVector __attribute__((vector_size(VECTOR_BYTES)));
typedef double DoubleVector __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t IntVector __attribute__((vector_size(VECTOR_BYTES)));
typedef int64_t LongVector __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t WordVector __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t HalfWordVector __attribute__((vector_size(VECTOR_BYTES / 2)));

template <class A> struct Of;  // the vectors with elements of type A, the type of sums
template <> struct Of<float> {
    typedef FloatVector V;
    typedef IntVector I;
};
template <> struct Of<double> {
    typedef DoubleVector V;
    typedef LongVector I;
};
template <class A> using V = typename Of<A>::V;
template <class A> constexpr int LANES = VECTOR_BYTES / int(sizeof(A));
template <class A> constexpr int PANEL = 2 * LANES<A>;  // matrix columns that are packed together

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

// The type of the sums for an element type.
template <class E> struct Wide {
    typedef float A;
};
template <> struct Wide<double> {
    typedef double A;
};

template <class T> inline T read_as(const void *from) {
    T value;
    __builtin_memcpy(&value, from, sizeof(T));
    return value;
}

inline FloatVector load(const float *from) { return read_as<FloatVector>(from); }
inline DoubleVector load(const double *from) { return read_as<DoubleVector>(from); }
inline FloatVector load(const BFloat16 *from) {
    // GCC compiles `__builtin_convertvector` to four instructions here, instead of one.
#if VECTOR_BYTES == 64
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#else
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#endif
    return (FloatVector)((WordVector)wide << 16);
}
inline FloatVector load(const Float16 *from) {
    FloatVector out;
#if defined(__AVX512F__)
    __m512 wide = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
    __builtin_memcpy(&out, &wide, sizeof(out));
#else
    for (int i = 0; i < LANES<float>; i += 8) {
        __m256 eight = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i)));
        __builtin_memcpy((float *)&out + i, &eight, sizeof(eight));
    }
#endif
    return out;
}
template <class A> inline void store(A *to, V<A> value) {
    __builtin_memcpy(to, &value, sizeof(value));
}

template <class A> inline V<A> all_of(A value) { return value - V<A>{}; }

inline float widened(float value) { return value; }
inline double widened(double value) { return value; }
inline float widened(BFloat16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    return read_as<float>(&bits);
}
inline float widened(Float16 value) { return _cvtsh_ss(value.bits); }

inline void narrow(float value, float *to) { *to = value; }
inline void narrow(double value, double *to) { *to = value; }
inline void narrow(float value, BFloat16 *to) {
    uint32_t bits = read_as<uint32_t>(&value);
    if (value != value)
        to->bits = uint16_t((bits >> 16) | 0x40);
    else  // rounds to nearest, ties to even
        to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float value, Float16 *to) {
    to->bits = uint16_t(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
}

// Like `narrow`, for all numbers of a vector.
inline void narrow_vector(FloatVector value, float *to) { store(to, value); }
inline void narrow_vector(DoubleVector value, double *to) { store(to, value); }
inline void narrow_vector(FloatVector value, BFloat16 *to) {
#ifdef __AVX512BF16__  // subnormal numbers become 0, as in products of this variant
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)value);
    __builtin_memcpy(to, &rounded, sizeof(rounded));
#else
    const WordVector bits = (WordVector)value;
    const WordVector rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const WordVector kept = value == value ? rounded : ((bits >> 16) | 0x40u);
    const HalfWordVector halves = __builtin_convertvector(kept, HalfWordVector);
    __builtin_memcpy(to, &halves, sizeof(halves));
#endif
}
inline void narrow_vector(FloatVector value, Float16 *to) {
#if VECTOR_BYTES == 64
    __m512 wide;
    __builtin_memcpy(&wide, &value, sizeof(wide));
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < LANES<float>; i += 8) {
        __m256 eight;
        __builtin_memcpy(&eight, (const float *)&value + i, sizeof(eight));
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(eight, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
}

// A NaN in `b` is ignored, but the weights that are computed from the NaN are NaN.
template <class X> inline X larger(X a, X b) { return b > a ? b : a; }

// Returns the sum of the lanes, added in pairs whose distance halves in each round.
template <class A> inline A sum(V<A> value) {
    A total[LANES<A>];
    store(total, value);
#pragma GCC unroll 4
    for (int half = LANES<A> / 2; half > 0; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) total[i] += total[i + half];
    return total[0];
}

#if defined(__clang__)
#define TWO(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define TWO(a, b, ...) __builtin_shuffle(a, b, I{__VA_ARGS__})
#endif

// Return the first (`low_halves`) or second halves of two vectors, interleaved.
inline DoubleVector low_halves(DoubleVector a, DoubleVector b) {
    typedef LongVector I;
    (void)sizeof(I);
#if VECTOR_BYTES == 32
    return TWO(a, b, 0, 4, 1, 5);
#else
    return TWO(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#endif
}
inline DoubleVector high_halves(DoubleVector a, DoubleVector b) {
    typedef LongVector I;
    (void)sizeof(I);
#if VECTOR_BYTES == 32
    return TWO(a, b, 2, 6, 3, 7);
#else
    return TWO(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#endif
}
inline FloatVector low_halves(FloatVector a, FloatVector b) {
    typedef IntVector I;
    (void)sizeof(I);
#if VECTOR_BYTES == 32
    return TWO(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
    return TWO(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#endif
}
inline FloatVector high_halves(FloatVector a, FloatVector b) {
    typedef IntVector I;
    (void)sizeof(I);
#if VECTOR_BYTES == 32
    return TWO(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
    return TWO(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#endif
}

// Transposes LANES vectors. Each round exchanges one bit of the row index with one bit of the
// column index.
template <class A> inline void transpose(V<A> *v) {
    constexpr int N = LANES<A>;
#pragma GCC unroll 4
    for (int round = 1; round < N; round *= 2) {
        V<A> next[N];
#pragma GCC unroll 8
        for (int i = 0; i < N / 2; i++) {
            next[2 * i] = low_halves(v[i], v[i + N / 2]);
            next[2 * i + 1] = high_halves(v[i], v[i + N / 2]);
        }
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) v[i] = next[i];
    }
}

// Reduces LANES vectors to one vector with a number for each, in their order. Each step applies
// `join` to adjacent lanes of two vectors, so it halves the vectors and doubles the numbers per
// vector.
template <class Join> inline DoubleVector joined(const DoubleVector *v, Join join) {
    typedef LongVector I;
    (void)sizeof(I);
#if VECTOR_BYTES == 32
    DoubleVector a = join(TWO(v[0], v[1], 0, 4, 2, 6), TWO(v[0], v[1], 1, 5, 3, 7));
    DoubleVector b = join(TWO(v[2], v[3], 0, 4, 2, 6), TWO(v[2], v[3], 1, 5, 3, 7));
    return join(TWO(a, b, 0, 1, 4, 5), TWO(a, b, 2, 3, 6, 7));
#else
    DoubleVector a[4], b[2];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        a[i] = join(TWO(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14),
                    TWO(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15));
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++)
        b[i] = join(TWO(a[2 * i], a[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13),
                    TWO(a[2 * i], a[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15));
    return join(TWO(b[0], b[1], 0, 1, 2, 3, 8, 9, 10, 11),
                TWO(b[0], b[1], 4, 5, 6, 7, 12, 13, 14, 15));
#endif
}
template <class Join> inline FloatVector joined(const FloatVector *v, Join join) {
    typedef IntVector I;
    (void)sizeof(I);
#if VECTOR_BYTES == 32
    FloatVector a[4], b[2];
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        a[i] = join(TWO(v[2 * i], v[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14),
                    TWO(v[2 * i], v[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15));
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++)
        b[i] = join(TWO(a[2 * i], a[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13),
                    TWO(a[2 * i], a[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15));
    return join(TWO(b[0], b[1], 0, 1, 2, 3, 8, 9, 10, 11),
                TWO(b[0], b[1], 4, 5, 6, 7, 12, 13, 14, 15));
#else
    FloatVector a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = join(TWO(v[2 * i], v[2 * i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28,
                        14, 30),
                    TWO(v[2 * i], v[2 * i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29,
                        15, 31));
#pragma GCC unroll 8
    for (int i = 0; i < 4; i++)
        b[i] = join(TWO(a[2 * i], a[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13,
                        28, 29),
                    TWO(a[2 * i], a[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15,
                        30, 31));
#pragma GCC unroll 8
    for (int i = 0; i < 2; i++)
        c[i] = join(TWO(b[2 * i], b[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25,
                        26, 27),
                    TWO(b[2 * i], b[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29,
                        30, 31));
    return join(TWO(c[0], c[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                TWO(c[0], c[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
#endif
}
template <class Vector> inline Vector sums(const Vector *v) {
    return joined(v, [](Vector a, Vector b) { return a + b; });
}
template <class Vector> inline Vector maxima(const Vector *v) {
    return joined(v, [](Vector a, Vector b) { return b > a ? b : a; });
}

// Returns e to the power of x, for x up to 88: within 2 units in the last place for x from -87,
// else 0.
inline FloatVector exponential(FloatVector x) {
    const float lowest = -87.0f;
    FloatVector y = x < lowest ? all_of(lowest) : x;
    // The addition of `shift` rounds to an integer, because the last place of the sum is 1.
    const float shift = 12582912.0f;
    FloatVector shifted = y * 1.44269504f + shift;
    FloatVector n = shifted - shift;
    FloatVector r = y - n * 0.693145751953125f;  // ln 2 in two parts; the first times n is exact
    r = r - n * 1.42860677e-6f;
    FloatVector p = all_of(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    // The last bits of `shifted` are n; they are moved to the bits of the exponent.
    WordVector power = ((WordVector)shifted << 23) + (127u << 23);
    FloatVector result = p * (FloatVector)power;
    return x < lowest ? FloatVector{} : result;
}
inline DoubleVector exponential(DoubleVector x) {
    DoubleVector result = {};
    for (int i = 0; i < LANES<double>; i++) result[i] = __builtin_exp(x[i]);
    return result;
}

inline FloatVector tangent(FloatVector x) {
    FloatVector size = x < 0.0f ? -x : x;
    FloatVector most = size > 10.0f ? all_of(10.0f) : size;  // beyond 10, tanh is 1 in float32
    FloatVector far = 1.0f - 2.0f / (exponential(2.0f * most) + 1.0f);
    FloatVector z = x * x;
    FloatVector p = all_of(-1382.0f / 155925);
    p = p * z + 62.0f / 2835;
    p = p * z - 17.0f / 315;
    p = p * z + 2.0f / 15;
    p = p * z - 1.0f / 3;
    FloatVector near = x + x * z * p;
    return size < 0.3f ? near : (x < 0.0f ? -far : far);
}
inline DoubleVector tangent(DoubleVector x) {
    DoubleVector result = {};
    for (int i = 0; i < LANES<double>; i++) result[i] = __builtin_tanh(x[i]);
    return result;
}

}  // namespace
