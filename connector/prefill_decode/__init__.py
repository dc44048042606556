# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode nodes that hand requests over: followed prompts, waits, hand-overs."""
