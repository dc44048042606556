# SPDX-License-Identifier: Apache-2.0
"""Logits processors, which change logits before sampling. None imports the scheduler or the API."""
