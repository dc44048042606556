# SPDX-License-Identifier: Apache-2.0
"""The shared cache server, for the tests of its clients."""

from __future__ import annotations

from ..cache_server.conftest import server, shared, stub

__all__ = ["server", "shared", "stub"]
