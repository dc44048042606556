# SPDX-License-Identifier: Apache-2.0
"""StrataConnector: StrataKV's tiers as a KV connector of vLLM."""
