# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiers, with StrataKV's copies between vLLM's KV cache and region, which vLLM's CPU
build lacks. The module is the peer's `spec_module_path`, and imports vLLM."""

from __future__ import annotations

from typing import Any

from ...connector.vllm.spec import StrataSpec


class PeerSpec(StrataSpec):
    """StrataSpec without StrataKV's tier: only vLLM's secondary tiers are below vLLM's region."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.secondary_tier_configs = self.secondary_tier_configs[:-1]

    def get_manager(self) -> Any:
        """Return vLLM's manager, whose shutdown also releases the region, as closing the tier
        does."""
        is_new = self._manager is None
        manager = super().get_manager()
        if is_new:
            shut_down = manager.shutdown

            def shutdown() -> None:
                shut_down()
                self.release_region()

            manager.shutdown = shutdown
        return manager
