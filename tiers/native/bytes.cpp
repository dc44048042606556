// SPDX-License-Identifier: Apache-2.0
// Operations of the tiers on many bytes in one call, without the interpreter: digests (XXH3, 128
// bits, no seed) of bytes as they are copied, received or sent, and tags of received or sent
// payloads.
//
// A digest covers the written bytes: every 64 bytes are read once, and are both stored and hashed.
// So a change of the source meanwhile cannot make the stored bytes differ from the hashed bytes.
#include <errno.h>
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define WIDE __attribute__((target("avx2")))

// Incremented with every change of a function; `native_library.py` has the same number.
EXPORTED int64_t stratakv_bytes_abi() { return 5; }

// Returns whether this processor and its operating system can run the functions.
EXPORTED int64_t stratakv_bytes_runs() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
}

// ---- XXH3, of more than 240 bytes

static const uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
static const uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F,
                      P64_3 = 0x165667B19E3779F9, P64_4 = 0x85EBCA77C2B2AE63,
                      P64_5 = 0x27D4EB2F165667C5;

// XXH3's default secret, for digests without a given secret.
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
static const int64_t AHEAD = 2048;  // bytes of the source that are prefetched ahead

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

// How the bytes of a stripe are written: not at all, through the cache, or bypassing the cache.
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

// Hashes complete blocks of BLOCK bytes, which must not include the last block.
template <Writing writing>
WIDE static void take_blocks(Sums &sums, uint8_t *to, const uint8_t *from, int64_t count) {
    for (; count > 0; count--, from += BLOCK, to += writing == NOT ? 0 : BLOCK) {
        for (int64_t i = 0; i < BLOCK / STRIPE; i++) {
            const char *const later = reinterpret_cast<const char *>(from + i * STRIPE + AHEAD);
            // The source is prefetched into the cache even if the target bypasses the cache,
            // because the next step writes to an evicted block. Bytes that are only hashed are
            // mostly cached already, and a prefetch would cost more than half of the time of
            // hashing.
            if (writing != NOT) _mm_prefetch(later, _MM_HINT_T0);
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

// Hashes the last block of `whole`, and writes the digest of all blocks, big-endian as in XXH128's
// canonical form.
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

// ---- XXH3, of 17 to 128 bytes

static uint64_t mixed_16(const uint8_t *at, int64_t secret) {
    return folded(word(at) ^ word(SECRET + secret), word(at + 8) ^ word(SECRET + secret + 8));
}

static uint64_t avalanched(uint64_t value) {
    value ^= value >> 37;
    value *= 0x165667919E3779F9;
    return value ^ value >> 32;
}

// Hashes pairs of 16 bytes from both ends, the inner pairs first.
static void short_digest(const uint8_t *data, int64_t size, uint8_t *digest) {
    uint64_t low = size * P64_1, high = 0;
    for (int64_t i = (size - 1) / 32; i >= 0; i--) {
        const uint8_t *const head = data + 16 * i, *const tail = data + size - 16 * (i + 1);
        low = (low + mixed_16(head, 32 * i)) ^ (word(tail) + word(tail + 8));
        high = (high + mixed_16(tail, 32 * i + 16)) ^ (word(head) + word(head + 8));
    }
    const uint64_t second = avalanched(low * P64_1 + high * P64_4 + size * P64_2);
    const uint64_t both[2] = {__builtin_bswap64(-second), __builtin_bswap64(avalanched(low + high))};
    memcpy(digest, both, sizeof both);
}

static const int64_t DIGEST = 16, MOST_NAME = 128 - DIGEST;

// Writes a tag: the digest of a name of 1 to MOST_NAME bytes followed by a payload's digest.
static void write_tag(const uint8_t *name, int64_t size, const uint8_t *digest, uint8_t *tag) {
    uint8_t both[MOST_NAME + DIGEST];
    memcpy(both, name, size);
    memcpy(both + size, digest, DIGEST);
    short_digest(both, size + DIGEST, tag);
}

// Copies `size` bytes, more than 240, and writes the 16 bytes of their digest. With `past`, the
// copy bypasses the cache.
EXPORTED WIDE int64_t stratakv_bytes_copy(uint8_t *to, const uint8_t *from, int64_t size,
                                          int64_t past, uint8_t *digest) {
    Sums sums = beginning();
    const int64_t blocks = (size - 1) / BLOCK;
    if (past && reinterpret_cast<uintptr_t>(to) % 32 == 0)
        take_blocks<PAST>(sums, to, from, blocks);
    else
        take_blocks<CACHED>(sums, to, from, blocks);
    memcpy(to + blocks * BLOCK, from + blocks * BLOCK, size - blocks * BLOCK);
    // The last stripe may overlap bytes that bypassed the cache, which this core reads correctly.
    end_digest(sums, to, size, digest);
    _mm_sfence();
    return 0;
}

// Copies as `stratakv_bytes_copy` does, for each i below `count`, row `from_rows[i]` of `from` to
// row `to_rows[i]` of `to`, whose rows begin `to_step` bytes apart. Writes 16 bytes of a digest for
// each.
EXPORTED WIDE int64_t stratakv_bytes_copy_rows(uint8_t *to, int64_t to_step, const int64_t *to_rows,
                                               const uint8_t *from, int64_t from_step,
                                               const int64_t *from_rows, int64_t count,
                                               int64_t size, int64_t past, uint8_t *digests) {
    for (int64_t i = 0; i < count; i++)
        stratakv_bytes_copy(to + to_rows[i] * to_step, from + from_rows[i] * from_step, size, past,
                            digests + i * 16);
    return 0;
}

// The header of a record (`tiers/record.py`): the checked fields, followed by the digest of these
// fields and the payload's digest.
static const int64_t HEADER = 128, CHECKED = HEADER - DIGEST, PAGE = 4096;
static const int64_t GENERATION_AT = 24, KEY_AT = 48, KEY = 40, TAG_AT = 96;

// Hashes `count` payloads of `size` bytes, more than 240, and writes a header page for each. `head`
// has the fields that all headers share, and `wanted` the expected digests. A payload with another
// digest is marked in `damaged`, and its header is zeros. `pieces` gets the address and length of
// each page and each payload, as one write call needs them.
EXPORTED WIDE int64_t stratakv_bytes_make_records(
    const uint8_t *const *places, int64_t count, int64_t size, const uint8_t *head,
    const uint8_t *keys, const uint64_t *generations, const uint8_t *tags, const uint8_t *wanted,
    uint8_t *pages, iovec *pieces, uint8_t *damaged) {
    for (int64_t i = 0; i < count; i++) {
        uint8_t *const header = pages + i * PAGE, *const digest = header + CHECKED;
        Sums sums = beginning();
        take_blocks<NOT>(sums, nullptr, places[i], (size - 1) / BLOCK);
        end_digest(sums, places[i], size, digest);
        damaged[i] = memcmp(wanted + i * DIGEST, digest, DIGEST) != 0;
        if (damaged[i]) {
            memset(header, 0, HEADER);
        } else {
            memcpy(header, head, CHECKED);
            memcpy(header + GENERATION_AT, generations + i, sizeof *generations);
            memcpy(header + KEY_AT, keys + i * KEY, KEY);
            memcpy(header + TAG_AT, tags + i * DIGEST, DIGEST);
            uint8_t sealed[DIGEST];
            short_digest(header, HEADER, sealed);
            memcpy(digest, sealed, DIGEST);
        }
        pieces[2 * i] = {header, size_t(PAGE)};
        pieces[2 * i + 1] = {const_cast<uint8_t *>(places[i]), size_t(size)};
    }
    return 0;
}

static int64_t now_micros() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t(1000000) + now.tv_nsec / 1000;
}

static const int64_t PART = 256 * 1024;  // bytes that are hashed while they are in the cache

// Limits calls of the socket to the time left until the monotonic microsecond `deadline`. Returns
// 0, -2 after the deadline, or an errno.
static int64_t set_timeout(int64_t fd, int option, int64_t deadline) {
    const int64_t left = deadline - now_micros();
    if (left <= 0) return -2;
    const timeval timeout = {left / 1000000, left % 1000000};
    return setsockopt(fd, SOL_SOCKET, option, &timeout, sizeof timeout) ? errno : 0;
}

// Receives and hashes one payload and its trailer. Returns the status of `stratakv_bytes_receive`.
WIDE static int64_t receive_one(int64_t fd, uint8_t *to, int64_t size, uint8_t *trailer,
                                int64_t more, int64_t deadline, uint8_t *digest) {
    Sums sums = beginning();
    const int64_t blocks = (size - 1) / BLOCK;
    int64_t received = 0, hashed = 0;  // number of bytes; of blocks
    while (received < size + more) {
        if (const int64_t status = set_timeout(fd, SO_RCVTIMEO, deadline)) return status;
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
            // The kernel counts a timeout in ticks, so a call may end before the deadline.
            if (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK) continue;
            return errno;
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

// Receives `count` payloads of `size` bytes, more than 240, each to its place and followed by
// `more` bytes of a trailer, by the monotonic microsecond `deadline`. Writes a digest of 16 bytes
// and, with `name_size`, a tag for each payload, and the number of complete payloads to `whole`.
// Returns 0, -1 if the peer has left, -2 after the deadline, or an errno.
EXPORTED int64_t stratakv_bytes_receive(int64_t fd, uint8_t *const *places, int64_t count,
                                        int64_t size, uint8_t *trailers, int64_t more,
                                        int64_t deadline, uint8_t *digests, const uint8_t *names,
                                        int64_t name_size, uint8_t *tags, int64_t *whole) {
    for (*whole = 0; *whole < count; ++*whole) {
        const int64_t i = *whole;
        uint8_t *const digest = digests + i * DIGEST;
        const int64_t status =
            receive_one(fd, places[i], size, trailers + i * more, more, deadline, digest);
        if (status) return status;
        if (name_size) write_tag(names + i * name_size, name_size, digest, tags + i * DIGEST);
    }
    return 0;
}

// Sends all `places` in order, by the deadline. Overwrites the vector.
static int64_t send_vector(int64_t fd, iovec *places, int64_t count, int flags, int64_t deadline) {
    while (count) {
        if (const int64_t status = set_timeout(fd, SO_SNDTIMEO, deadline)) return status;
        msghdr message = {};
        message.msg_iov = places;
        message.msg_iovlen = count;
        int64_t sent = sendmsg(fd, &message, flags | MSG_NOSIGNAL);
        if (sent < 0) {
            // The kernel counts a timeout in ticks, so a call may end before the deadline.
            if (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK) continue;
            return errno;
        }
        for (; count && sent >= int64_t(places->iov_len); places++, count--) sent -= places->iov_len;
        if (count) {
            places->iov_base = static_cast<uint8_t *>(places->iov_base) + sent;
            places->iov_len -= sent;
        }
    }
    return 0;
}

static iovec vector_of(const uint8_t *from, int64_t size) {
    return {const_cast<uint8_t *>(from), size_t(size)};
}

static const int64_t MOST_AT_ONCE = 256;  // most payloads of one sendmsg, which allows 1,024 pieces

// Sends `head`, then `count` payloads of `size` bytes, each followed by `more` bytes of `trailers`.
// Returns the status of `stratakv_bytes_receive`.
EXPORTED int64_t stratakv_bytes_send(int64_t fd, const uint8_t *head, int64_t head_size,
                                     const uint8_t *const *places, int64_t count, int64_t size,
                                     const uint8_t *trailers, int64_t more, int64_t deadline) {
    iovec vector[1 + 2 * MOST_AT_ONCE] = {vector_of(head, head_size)};
    int64_t pieces = 1, i = 0;
    do {
        for (const int64_t end = i + MOST_AT_ONCE; i < count && i < end; i++) {
            vector[pieces++] = vector_of(places[i], size);
            vector[pieces++] = vector_of(trailers + i * more, more);
        }
        const int64_t status = send_vector(fd, vector, pieces, i < count ? MSG_MORE : 0, deadline);
        if (status) return status;
        pieces = 0;
    } while (i < count);
    return 0;
}

// The bytes that are hashed before they are sent: with smaller groups the receiver, which is faster
// than hashing and sending, would sleep and be woken for each group.
static const int64_t GROUP = 4096 * 1024;

// Sends `count` payloads of `size` bytes, more than 240, each followed by its tag (see `write_tag`)
// and its digest. `wanted` has the expected digests, each valid if `is_wanted`. A payload with
// another digest is marked in `damaged` and followed by zeros. Returns the status of
// `stratakv_bytes_receive`.
EXPORTED WIDE int64_t stratakv_bytes_send_proven(int64_t fd, const uint8_t *const *places,
                                                 int64_t count, int64_t size, const uint8_t *names,
                                                 int64_t name_size, const uint8_t *wanted,
                                                 const uint8_t *is_wanted, int64_t deadline,
                                                 uint8_t *damaged) {
    uint8_t proofs[MOST_AT_ONCE][2 * DIGEST];
    iovec vector[2 * MOST_AT_ONCE];
    for (int64_t i = 0; i < count;) {
        int64_t pieces = 0;
        for (int64_t bytes = 0; i < count && bytes < GROUP && pieces < 2 * MOST_AT_ONCE; i++) {
            uint8_t *const proof = proofs[pieces / 2];
            Sums sums = beginning();
            take_blocks<NOT>(sums, nullptr, places[i], (size - 1) / BLOCK);
            end_digest(sums, places[i], size, proof + DIGEST);
            write_tag(names + i * name_size, name_size, proof + DIGEST, proof);
            damaged[i] = is_wanted[i] && memcmp(wanted + i * DIGEST, proof + DIGEST, DIGEST);
            if (damaged[i]) memset(proof, 0, 2 * DIGEST);
            vector[pieces++] = vector_of(places[i], size);
            vector[pieces++] = vector_of(proof, 2 * DIGEST);
            bytes += size;
        }
        const int64_t status = send_vector(fd, vector, pieces, i < count ? MSG_MORE : 0, deadline);
        if (status) return status;
    }
    return 0;
}
