# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench speculation`: decodes with draft tokens compared with decodes without drafts.

It runs on the CPU, with the embedded model or a deeper copy of it, for one request and for sixteen
at once. Two engines that differ only in `--speculative-method` get the same prompts in turn. The KV
pool holds the prompts, so that decoding takes the time. A ratio is the median of the ratios within
a round, of processor seconds of all threads; wall-clock ratios are reported too.

speedup_repetitive_1, _16   Tokens a second of greedy answers that quote a text or edit code, over
    the rate without drafts. `quotes.py` says how so small a model is made to quote.
speedup_draft_model_1, _16   The same with a draft model that is always right and an eighth as deep
    (`models.py`): the most that such a pair can gain.
first_token_in_parts   The wall-clock time from the last part to the first token of a prompt of
    3,600 tokens sent in fifty parts, over that of the prompt sent whole (`parts.py`).
speedup_where_it_does_not_pay   The least ratio for answers sampled after random words, for one
    request and for sixteen, also with a draft model that is always wrong.
speedup_where_an_eagle_head_does_not_pay   The same with an EAGLE head that is always wrong. It
    keeps hidden states and computes every block, so its gate is lower."""
