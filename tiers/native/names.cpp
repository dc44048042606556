// SPDX-License-Identifier: Apache-2.0
// Stored keys of many blocks, made in one call. OpenSSL computes the hashes; the caller has found
// OpenSSL's functions in the library that Python's hashlib uses.
#include <stdint.h>
#include <string.h>

#define EXPORTED extern "C" __attribute__((visibility("default")))

// OpenSSL's functions for contexts of SHA-256, as in <openssl/evp.h>, in the order of `openssl.py`.
// Functions that return a number return 1 on success.
struct Functions {
    void *(*make)();
    void (*release)(void *context);
    int (*copy)(void *to, const void *from);
    int (*update)(void *context, const void *bytes, size_t size);
    int (*finish)(void *context, uint8_t *digest, unsigned *size);
};

static const int64_t DIGEST = 32, MOST_DIGEST = 64;

// Writes the digest of the bytes that `begun` has hashed, followed by `size` more bytes.
static bool end_hash(const Functions *of, void *context, const void *begun, const uint8_t *bytes,
                     int64_t size, uint8_t *digest) {
    uint8_t whole[MOST_DIGEST];
    unsigned whole_size = 0;
    const bool done = of->copy(context, begun) == 1 && of->update(context, bytes, size) == 1 &&
                      of->finish(context, whole, &whole_size) == 1 && whole_size == DIGEST;
    if (done) memcpy(digest, whole, DIGEST);
    return done;
}

// Writes a new key for each of `count` keys of `size` bytes, DIGEST or more: the HMAC of the key,
// followed by the key's bytes after the first DIGEST. `inner` and `outer` have hashed HMAC's two
// key blocks, and are not changed. Returns 0, or 1 if an OpenSSL function failed.
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
