# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench vllm`: StrataKV's tiers below a real vLLM, compared with vLLM's own tiers."""
