# SPDX-License-Identifier: Apache-2.0
"""The device of the worker: its stream, its memory, and the size of the KV pool that fits on it."""
