// SPDX-License-Identifier: Apache-2.0
// The variant for processors with AVX-512: attention, products and decoders. `setup.py` compiles
// the file.
#define VECTOR_BYTES 64
#include "network.h"

extern const Variant stratakv_avx512;
const Variant stratakv_avx512 = {
    panel, together, pack, product_bytes, multiply, pass_bytes, pass, workspace_bytes,
    write, attend,
};
