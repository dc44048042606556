# SPDX-License-Identifier: Apache-2.0
"""The proxy in front of prefill and decode nodes: it needs no model, no torch and no engine."""
