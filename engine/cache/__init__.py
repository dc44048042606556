# SPDX-License-Identifier: Apache-2.0
"""The bookkeeping of KV blocks: free blocks, shared blocks, and the hashes for prefix lookups."""
