# SPDX-License-Identifier: Apache-2.0
"""The trace of an engine's steps: state, cache hits and decisions, one JSON object per line."""
