// SPDX-License-Identifier: Apache-2.0
// The stored keys of many blocks in one call. OpenSSL does the hashing, by functions that the
// caller found in the library that Python's hashlib uses.
#include <stdint.h>
#include <string.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Of OpenSSL, as <openssl/evp.h> declares them, for contexts of SHA-256. Those that return a number
// return 1 where all went well. `openssl.py` has the same order.
struct Functions {
    void *(*make)();
    void (*release)(void *context);
    int (*copy)(void *to, const void *from);
    int (*update)(void *context, const void *bytes, size_t size);
    int (*finish)(void *context, uint8_t *digest, unsigned *size);
};

static const int64_t DIGEST = 32, MOST_DIGEST = 64;

// The digest of what `begun` has taken already and of `size` bytes more.
static bool end_hash(const Functions *of, void *context, const void *begun, const uint8_t *bytes,
                     int64_t size, uint8_t *digest) {
    uint8_t whole[MOST_DIGEST];
    unsigned whole_size = 0;
    const bool done = of->copy(context, begun) == 1 && of->update(context, bytes, size) == 1 &&
                      of->finish(context, whole, &whole_size) == 1 && whole_size == DIGEST;
    if (done) memcpy(digest, whole, DIGEST);
    return done;
}

// For each of `count` keys of `size` bytes, DIGEST or more, a stored key as long: HMAC of the key,
// then what follows the key's first DIGEST bytes. `inner` and `outer` have taken the two blocks
// that HMAC makes of its own key, and stay as they are. 0, or 1 where OpenSSL failed.
EXPORTED int64_t stratakv_bytes_names(const Functions *of, const void *inner, const void *outer,
                                      const uint8_t *keys, int64_t count, int64_t size,
                                      uint8_t *names) {
    void *const context = of->make();
    if (!context) return 1;
    bool done = true;
    for (; done && count > 0; count--, keys += size, names += size) {
        uint8_t digest[DIGEST];
        done = end_hash(of, context, inner, keys, size, digest) &&
               end_hash(of, context, outer, digest, DIGEST, names);
        memcpy(names + DIGEST, keys + DIGEST, size - DIGEST);
    }
    of->release(context);
    return !done;
}
