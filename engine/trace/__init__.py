# SPDX-License-Identifier: Apache-2.0
"""The trace of an engine's steps: its state, cache hits and decisions, a line of JSON for each."""
