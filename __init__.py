# SPDX-License-Identifier: Apache-2.0
"""StrataKV: a tiered KV cache for LLM serving: GPU, then CPU memory, NVMe and network.

The repository root is this package. Nothing is imported here, so that `import stratakv` costs
nothing and pulls in no optional dependency; import the folder you need, such as `stratakv.tiers`.
"""

__version__ = "0.1.0"
