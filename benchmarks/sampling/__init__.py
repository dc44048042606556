# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench sampling`: from logits to tokens, held against torch and transformers."""
