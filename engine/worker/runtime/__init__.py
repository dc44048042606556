# SPDX-License-Identifier: Apache-2.0
"""The device under a step: its memory, its events and how large a pool fits on it."""
