# SPDX-License-Identifier: Apache-2.0
"""Small parts about copies: their numbers, how pairs merge, and when jobs end."""

from __future__ import annotations
