# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench transfer`: copies between the KV pool and the slab, on the CPU device.

Blocks of 64 KiB, 256 KiB, 2 MiB and 5 MiB, single ones and runs of neighbours, one way and both
ways at once, against memcpy of the same pieces between as random places; what submitting a job of
64 blocks costs the step loop; and what a request would gain by computing the first layers while the
last ones are loaded. Every figure and its limit are taken in turn, over more memory
than caches hold, what arrived is compared, and a ratio is the median of the ratios within a round.
"""
