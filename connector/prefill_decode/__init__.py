# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode on different engines: followed prompts, waits and hand-overs."""
