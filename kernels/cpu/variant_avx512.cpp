// SPDX-License-Identifier: Apache-2.0
// Attention and products for processors with AVX512; `setup.py` compiles it for them.
#define VECTOR_BYTES 64
#include "network.h"

extern const Variant stratakv_avx512;
const Variant stratakv_avx512 = {
    panel, together, pack, product_bytes, multiply, pass_bytes, pass, workspace_bytes,
    write, attend,
};
