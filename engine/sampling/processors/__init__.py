# SPDX-License-Identifier: Apache-2.0
"""Logits processors, which change logits before sampling. Imports neither scheduler nor API."""
