# SPDX-License-Identifier: Apache-2.0
"""The device of the worker: its memory, its queue, and the size of the pool that fits on it."""
