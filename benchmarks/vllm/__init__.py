# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench vllm`: our tiers below a real vLLM, and what vLLM has itself."""
