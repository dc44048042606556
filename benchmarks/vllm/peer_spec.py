# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tiers with the copies that its CPU build lacks. The peer's `spec_module_path` is this
module, which imports vLLM."""

from __future__ import annotations

from typing import Any

from ...connector.vllm.spec import StrataSpec


class PeerSpec(StrataSpec):
    """StrataSpec without our tier: only vLLM's code lies between its region and secondary tiers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.secondary_tier_configs = self.secondary_tier_configs[:-1]

    def get_manager(self) -> Any:
        """vLLM's manager. Its shutdown releases the region too, as closing our tier would."""
        is_new = self._manager is None
        manager = super().get_manager()
        if is_new:
            shut_down = manager.shutdown

            def shutdown() -> None:
                shut_down()
                self.release_region()

            manager.shutdown = shutdown
        return manager
