# SPDX-License-Identifier: Apache-2.0
"""The HTTP proxy in front of prefill and decode nodes, which needs no model, torch or engine."""
