# SPDX-License-Identifier: Apache-2.0
"""Keeps blocks on a local disk; never imports torch, the connector or the engine.

store     what the hierarchy calls; look-ups
opening   directory, guard (with scan in a child process), space: from a path to a running store
reader    slots → buffers, verified          writer   buffers → slots → rows, in safe order
slot_index in memory   index_file in LMDB    slot_file the records
"""

from .store import SsdStore

__all__ = ["SsdStore"]
