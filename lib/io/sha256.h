/* sha256.h: SHA-256 (FIPS 180-4). Token files and checkpoints identify their tokenizer by it. */
#ifndef SHA256_H
#define SHA256_H
#include "../device/base.h" // includes the system's headers

static inline uint32_t sha256_rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

/* Adds one block of 64 bytes to the hash value h (section 6.2.2). */
static inline void sha256_block(uint32_t h[8], const uint8_t p[64]) {
    static const uint32_t k[64] = {
        // section 4.2.2: fractions of the cube roots of the first 64 primes
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t w[64]; // the message schedule
    uint32_t v[8];  // the working variables a to h
    memcpy(v, h, sizeof v);
    for (int t = 0; t < 16; t++)
        w[t] = (uint32_t)p[4 * t] << 24 | (uint32_t)p[4 * t + 1] << 16 | (uint32_t)p[4 * t + 2] << 8 | p[4 * t + 3];
    for (int t = 16; t < 64; t++) {
        uint32_t sigma0 = sha256_rotate(w[t - 15], 7) ^ sha256_rotate(w[t - 15], 18) ^ w[t - 15] >> 3;
        uint32_t sigma1 = sha256_rotate(w[t - 2], 17) ^ sha256_rotate(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = w[t - 16] + sigma0 + w[t - 7] + sigma1;
    }
    for (int t = 0; t < 64; t++) {
        uint32_t sum1 = sha256_rotate(v[4], 6) ^ sha256_rotate(v[4], 11) ^ sha256_rotate(v[4], 25);
        uint32_t sum0 = sha256_rotate(v[0], 2) ^ sha256_rotate(v[0], 13) ^ sha256_rotate(v[0], 22);
        uint32_t t1 = v[7] + sum1 + ((v[4] & v[5]) ^ (~v[4] & v[6])) + k[t] + w[t];
        uint32_t t2 = sum0 + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof v[0]);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++) h[i] += v[i];
}

/* The hash of `len` bytes. The message is padded by a one bit, zeros up to a whole block, and its length in bits, in
 * the last 8 bytes (section 5.1.1). */
static inline void sha256(const char *text, size_t len, uint8_t out[32]) {
    uint32_t h[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t tail[128] = {0};
    size_t whole = len / 64 * 64, rest = len - whole, tail_len = rest < 56 ? 64 : 128;
    for (size_t i = 0; i < whole; i += 64) sha256_block(h, (const uint8_t *)text + i);
    if (rest) memcpy(tail, text + whole, rest);
    tail[rest] = 0x80;
    for (int i = 0; i < 8; i++) tail[tail_len - 8 + (size_t)i] = (uint8_t)((uint64_t)len * 8 >> (56 - 8 * i));
    for (size_t i = 0; i < tail_len; i += 64) sha256_block(h, tail + i);
    for (int i = 0; i < 32; i++) out[i] = (uint8_t)(h[i / 4] >> (24 - 8 * (i % 4)));
}

#endif
