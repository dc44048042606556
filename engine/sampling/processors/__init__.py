# SPDX-License-Identifier: Apache-2.0
"""Logits processors: they change logits before the draw, and import no scheduler and no API."""
