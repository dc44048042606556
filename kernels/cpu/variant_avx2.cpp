// SPDX-License-Identifier: Apache-2.0
// The variant for processors with AVX2: attention, products and decoders. `setup.py` compiles the
// file.
#define VECTOR_BYTES 32
#include "network.h"

extern const Variant stratakv_avx2;
const Variant stratakv_avx2 = {
    panel, together, pack, product_bytes, multiply, pass_bytes, pass, workspace_bytes,
    write, attend,
};
