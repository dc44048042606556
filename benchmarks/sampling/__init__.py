# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench sampling`: from the logits of 256 rows with 151,936 tokens to a token each.

On the CPU it compares a greedy batch with `argmax`, and a random batch with all parameters with
`softmax` and `argmax`. It compares the batch's logits processors with those of transformers, which
hold one request's parameters and so run row by row. Then it runs decodes of the embedded model with
and without a JSON schema (`grammar_step.py`) and beside hostile grammars (`hostile.py`). Both sides
of a figure are measured alternately and must agree; a ratio is the median of the ratios within a
round. All ratios but the last are of processor seconds, which other work on the machine disturbs
least. One thread computes, because several would wait by spinning. Wall-clock ratios are reported
too. Waiting beside hostile grammars is measured in wall-clock time only."""
