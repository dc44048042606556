# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench sampling`: from the logits of 256 rows with 151,936 tokens to a token each.

On the CPU. A greedy batch against `argmax` alone; a random batch with every wish at once against
`softmax` and `argmax`; and the logits processors of the batch against those of transformers, which
have one request's parameters each and so run row by row. Then the embedded model, whose decodes
follow a JSON schema or none (`grammar_step.py`), or run beside hostile grammars (`hostile.py`).
Both sides of a figure are taken in turn and must agree; a ratio is the median of the ratios within
a round. All but the last are of processor seconds, which other work on the machine disturbs least,
with one thread that computes, since several wait for each other by spinning; the same by the clock
stands beside it. What others wait beside hostile grammars is by the clock alone.
"""
