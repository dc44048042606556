# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench speculation`: decodes with draft tokens compared with decodes without drafts.

The benchmark runs on the CPU, with the embedded model or a deeper copy of that model, for one
request and for sixteen at once. Two engines that differ only in `--speculative-method` get the same
prompts in turn. The KV pool has all prompts, so that only decoding is measured. A ratio is the
median of the ratios within a round, in processor seconds of all threads; the report has wall-clock
ratios too.

speedup_repetitive_1, _16   Tokens per second of greedy answers that quote a text or edit code, over
    the rate without drafts. `quotes.py` makes the small model quote.
speedup_draft_model_1, _16   The same ratio with a draft model that is always right and an eighth as
    deep (`models.py`), which is the largest gain of such a pair.
first_token_in_parts   The wall-clock time from the last part to the first token of a prompt of
    3,600 tokens in fifty parts, over the time to the first token of the whole prompt (`parts.py`).
speedup_where_it_does_not_pay   The lowest ratio for answers that are sampled after random words,
    for one request and for sixteen, also with a draft model that is always wrong.
speedup_where_an_eagle_head_does_not_pay   The same ratio with an EAGLE head that is always wrong.
    The gate is lower, because an EAGLE head needs stored hidden states and computes every block."""
