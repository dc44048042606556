// SPDX-License-Identifier: Apache-2.0
// Attention for processors with AVX512; `setup.py` compiles it for them.
#define VECTOR_BYTES 64
#include "attention.h"

extern const Variant stratakv_avx512;
const Variant stratakv_avx512 = {workspace_bytes, write, attend};
