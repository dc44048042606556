# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the GPU: its ceilings, and every kernel and copy held against them."""
