# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench speculation`: decodes whose steps check draft tokens, against those that do not.

On the CPU, of the embedded model, one request and sixteen at once. Two engines that differ by
`--speculative-method` alone have the same prompts and are run in turn; prompts are found in the KV
pool, so that decoding is what takes the time. A ratio is the median of the ratios within a round,
of processor seconds of all threads, with one that computes; the same by the clock stands beside it.

speedup_repetitive_1, _16   Greedy answers that quote a text, or edit code: tokens a second, over
    those without drafts. `quotes.py` says how so small a model is had to quote.
speedup_draft_model_1, _16   The same of a draft model that is always right, and an eighth as deep
    (`models.py`): the most that such a pair can gain.
first_token_in_parts   The time to the first token of a prompt of 3,600 tokens that came in fifty
    parts, from the last one on, over that of the prompt sent whole, by the clock (`parts.py`).
speedup_where_it_does_not_pay   The least ratio of answers that are drawn behind words without an
    order, of one request and of sixteen, and of a draft model that is always wrong.
speedup_where_an_eagle_head_does_not_pay   The same of an EAGLE head that is always wrong. It
    keeps hidden states and computes every block, so less is promised of it.
"""
