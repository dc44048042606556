// SPDX-License-Identifier: Apache-2.0
// What the tiers do to many bytes in one call, without the interpreter: digests (XXH3, 128 bits, no
// seed) of bytes as they are copied or received.
//
// A digest is of what is written: every 64 bytes are read once, and what was read is both stored
// and taken into the digest, so that nobody who changes the source meanwhile can have other bytes
// arrive than were hashed.
#include <errno.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/time.h>
#include <time.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define WIDE __attribute__((target("avx2")))

// Grows with every change of a function; `library.py` has the same number.
EXPORTED int64_t stratakv_bytes_abi() { return 2; }

// Whether this processor, and the system with it, runs them.
EXPORTED int64_t stratakv_bytes_runs() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
}

// ---- XXH3, of more than 240 bytes

static const uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
static const uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F,
                      P64_3 = 0x165667B19E3779F9, P64_4 = 0x85EBCA77C2B2AE63,
                      P64_5 = 0x27D4EB2F165667C5;

// The algorithm's own bytes where no secret is given.
static const uint8_t SECRET[192] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
static const int64_t STRIPE = 64, BLOCK = 1024, LAST = sizeof SECRET - STRIPE;
static const int64_t AHEAD = 2048;  // bytes that are asked for before they are used

struct Sums {
    __m256i low, high;
};

WIDE static inline __m256i loaded(const uint8_t *at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
}

WIDE static inline __m256i taken(__m256i sum, __m256i data, const uint8_t *secret) {
    const __m256i mixed = _mm256_xor_si256(data, loaded(secret));
    const __m256i product = _mm256_mul_epu32(mixed, _mm256_srli_epi64(mixed, 32));
    return _mm256_add_epi64(_mm256_add_epi64(sum, _mm256_shuffle_epi32(data, 0x4E)), product);
}

WIDE static inline __m256i scrambled(__m256i sum, const uint8_t *secret) {
    const __m256i mixed =
        _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), loaded(secret));
    const __m256i prime = _mm256_set1_epi64x(P32_1);
    const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64(high, 32));
}

WIDE static Sums beginning() {
    return {_mm256_set_epi64x(P64_3, P64_2, P64_1, P32_3),
            _mm256_set_epi64x(P32_1, P64_5, P32_2, P64_4)};
}

// How the bytes of a stripe are written: not at all, through the cache, past it.
enum Writing { NOT, CACHED, PAST };

template <Writing writing>
WIDE static inline void take_stripe(Sums &sums, uint8_t *to, const uint8_t *from, int64_t secret) {
    const __m256i low = loaded(from), high = loaded(from + 32);
    __m256i *const target = reinterpret_cast<__m256i *>(to);
    if (writing == CACHED) {
        _mm256_storeu_si256(target, low);
        _mm256_storeu_si256(target + 1, high);
    } else if (writing == PAST) {
        _mm256_stream_si256(target, low);
        _mm256_stream_si256(target + 1, high);
    }
    sums.low = taken(sums.low, low, SECRET + secret);
    sums.high = taken(sums.high, high, SECRET + secret + 32);
}

// Whole blocks of BLOCK bytes, none of them the last one.
template <Writing writing>
WIDE static void take_blocks(Sums &sums, uint8_t *to, const uint8_t *from, int64_t count) {
    for (; count > 0; count--, from += BLOCK, to += writing == NOT ? 0 : BLOCK) {
        for (int64_t i = 0; i < BLOCK / STRIPE; i++) {
            const char *const later = reinterpret_cast<const char *>(from + i * STRIPE + AHEAD);
            // What goes past the cache is not wanted there where it comes from either.
            if (writing == PAST)
                _mm_prefetch(later, _MM_HINT_NTA);
            else
                _mm_prefetch(later, _MM_HINT_T0);
            take_stripe<writing>(sums, to + i * STRIPE, from + i * STRIPE, 8 * i);
        }
        sums.low = scrambled(sums.low, SECRET + LAST);
        sums.high = scrambled(sums.high, SECRET + LAST + 32);
    }
}

static uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

static uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static uint64_t merged(const uint64_t *sums, int64_t secret, uint64_t start) {
    const uint8_t *at = SECRET + secret;
    for (int i = 0; i < 4; i++, at += 16)
        start += folded(sums[2 * i] ^ word(at), sums[2 * i + 1] ^ word(at + 8));
    start ^= start >> 37;
    start *= 0x165667919E3779F9;
    return start ^ start >> 32;
}

// The last block, which lies at `tail` with all before it, and the digest, big-endian as in
// XXH128's canonical form.
WIDE static void end_digest(Sums &sums, const uint8_t *whole, int64_t size, uint8_t *digest) {
    const int64_t done = (size - 1) / BLOCK * BLOCK;
    for (int64_t i = 0; i < (size - 1 - done) / STRIPE; i++)
        take_stripe<NOT>(sums, nullptr, whole + done + i * STRIPE, 8 * i);
    take_stripe<NOT>(sums, nullptr, whole + size - STRIPE, LAST - 7);
    uint64_t all[8];
    memcpy(all, &sums, sizeof all);
    const uint64_t high = merged(all, LAST - 11, ~(size * P64_2));
    const uint64_t low = merged(all, 11, size * P64_1);
    const uint64_t both[2] = {__builtin_bswap64(high), __builtin_bswap64(low)};
    memcpy(digest, both, sizeof both);
}

// Copies `size` bytes, more than 240, and writes the 16 bytes of their digest. `past`: the target
// is not to be brought into the cache.
EXPORTED WIDE int64_t stratakv_bytes_copy(uint8_t *to, const uint8_t *from, int64_t size,
                                          int64_t past, uint8_t *digest) {
    Sums sums = beginning();
    const int64_t blocks = (size - 1) / BLOCK;
    if (past && reinterpret_cast<uintptr_t>(to) % 32 == 0)
        take_blocks<PAST>(sums, to, from, blocks);
    else
        take_blocks<CACHED>(sums, to, from, blocks);
    memcpy(to + blocks * BLOCK, from + blocks * BLOCK, size - blocks * BLOCK);
    // The last stripe may reach back into what was written past the cache, which this core sees.
    end_digest(sums, to, size, digest);
    _mm_sfence();
    return 0;
}

// The same for `count` rows of two tables: row `to_rows[i]` of `to`, whose rows begin `to_step` bytes
// apart, from row `from_rows[i]` of `from`; 16 bytes of a digest for each.
EXPORTED WIDE int64_t stratakv_bytes_copy_rows(uint8_t *to, int64_t to_step, const int64_t *to_rows,
                                               const uint8_t *from, int64_t from_step,
                                               const int64_t *from_rows, int64_t count,
                                               int64_t size, int64_t past, uint8_t *digests) {
    for (int64_t i = 0; i < count; i++)
        stratakv_bytes_copy(to + to_rows[i] * to_step, from + from_rows[i] * from_step, size, past,
                            digests + i * 16);
    return 0;
}

static int64_t now_micros() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t(1000000) + now.tv_nsec / 1000;
}

static const int64_t PART = 256 * 1024;  // received, then hashed while it is in the cache

// The same for one of `receive`'s blocks.
WIDE static int64_t receive_one(int64_t fd, uint8_t *to, int64_t size, uint8_t *trailer,
                                int64_t more, int64_t deadline, uint8_t *digest) {
    Sums sums = beginning();
    const int64_t blocks = (size - 1) / BLOCK;
    int64_t received = 0, hashed = 0;  // bytes; blocks
    while (received < size + more) {
        const int64_t left = deadline - now_micros();
        if (left <= 0) return -2;
        const timeval timeout = {left / 1000000, left % 1000000};
        if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout)) return errno;
        int64_t part = PART - received % PART;
        if (part > size - received) part = size - received;
        if (part < 0) part = 0;
        const int64_t behind = received > size ? received - size : 0;
        iovec places[2] = {{to + received, size_t(part)}, {trailer + behind, size_t(more - behind)}};
        msghdr message = {};
        message.msg_iov = places + (part == 0);
        message.msg_iovlen = part == 0 ? 1 : 1 + (received + part == size && more > 0);
        const int64_t got = recvmsg(fd, &message, MSG_WAITALL);
        if (got == 0) return -1;
        if (got < 0) {
            if (errno == EINTR) continue;
            return errno == EAGAIN || errno == EWOULDBLOCK ? -2 : errno;
        }
        received += got;
        const int64_t whole = (received < size ? received : size) / BLOCK;
        const int64_t ready = (whole < blocks ? whole : blocks) - hashed;
        take_blocks<NOT>(sums, nullptr, to + hashed * BLOCK, ready);
        hashed += ready;
    }
    end_digest(sums, to, size, digest);
    return 0;
}

// Receives `count` payloads of `size` bytes, more than 240, each to its place, and `more` bytes
// behind each, by the monotonic microsecond `deadline`; writes 16 bytes of a digest for each, and
// how many came whole. 0, or -1 where the peer has left, -2 after the deadline, else the error's
// number.
EXPORTED int64_t stratakv_bytes_receive(int64_t fd, uint8_t *const *places, int64_t count,
                                        int64_t size, uint8_t *trailers, int64_t more,
                                        int64_t deadline, uint8_t *digests, int64_t *whole) {
    for (*whole = 0; *whole < count; ++*whole) {
        const int64_t i = *whole;
        const int64_t status = receive_one(fd, places[i], size, trailers + i * more, more, deadline,
                                           digests + i * 16);
        if (status) return status;
    }
    return 0;
}
