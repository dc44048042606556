# SPDX-License-Identifier: Apache-2.0
"""The attention kernels and KV writes, compared with those of other projects."""
