# SPDX-License-Identifier: Apache-2.0
"""The attention kernels and KV writes, beside those of other projects."""
