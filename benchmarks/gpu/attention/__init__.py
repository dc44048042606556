# SPDX-License-Identifier: Apache-2.0
"""The sections for KV writes and attention kernels, also compared with other projects' kernels."""
