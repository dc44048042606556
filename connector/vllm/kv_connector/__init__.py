# SPDX-License-Identifier: Apache-2.0
"""StrataConnector: our tiers as a KV connector of vLLM's own, between its KV cache and the slab."""
