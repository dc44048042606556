# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench transfer`: measures copies between the KV pool and the slab, on the CPU device.

Copies of blocks of 64 KiB, 256 KiB, 2 MiB and 5 MiB, single or in runs of adjacent blocks, in one
direction and in the two directions at the same time, are compared with memcpy of equal pieces
between random places. Further figures are the cost of submitting a job of 64 blocks, and the gain
of computing the first layers while the last layers are loaded. A figure and its limit are measured
alternately, in regions that are larger than the caches. Copied bytes are compared. A ratio is the
median of the ratios within a round."""
