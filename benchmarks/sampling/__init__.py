# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench sampling`: the time from logits to tokens, for 256 rows of 151,936 logits.

On the CPU, a greedy batch is compared with `argmax`, and a random batch with all parameters with
`softmax` and `argmax`. The batch's logits processors are compared with those of transformers, which
have one request's parameters and so run row by row. Further cases are decodes of the embedded model
with and without a JSON schema (`grammar_step.py`) and during hostile grammars (`hostile.py`). The
two sides of a figure are measured alternately and must give equal results; a ratio is the median of
the ratios within a round. Ratios are of processor seconds, which other work on the machine disturbs
least; wall-clock ratios are reported too. Only the waits during hostile grammars are in wall-clock
time. One thread computes, because several threads would wait by spinning."""
