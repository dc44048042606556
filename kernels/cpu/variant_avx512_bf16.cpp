// SPDX-License-Identifier: Apache-2.0
// Attention and products for processors whose AVX-512 multiplies bfloat16; `setup.py` compiles it for them.
#define VECTOR_BYTES 64
#include "network.h"

extern const Variant stratakv_avx512_bf16;
const Variant stratakv_avx512_bf16 = {
    panel, together, pack, product_bytes, multiply, pass_bytes, pass, workspace_bytes,
    write, attend,
};
