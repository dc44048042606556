# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench transfer`: copies between the KV pool and the slab, on the CPU device.

It copies blocks of 64 KiB, 256 KiB, 2 MiB and 5 MiB, single or in runs of neighbours, one way and
both ways at once, compared with memcpy of equal pieces between random places. It also measures the
cost of submitting a job of 64 blocks, and the gain of computing first layers while last ones load.
A figure and its limit are measured alternately, in more memory than caches hold. Copied bytes are
compared. A ratio is the median of the ratios within a round."""
