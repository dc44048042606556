# SPDX-License-Identifier: Apache-2.0
"""Keeps blocks on a local disk; never imports torch, the connector or the engine.

store     what the hierarchy calls; look-ups
opening   directory, guard (with scan in a child process), identity, space: from a path to a
          running store
reader    slots → buffers, verified          writer   buffers → slots → rows, in safe order
slot_index in memory (slot_list, free_slots)   index_file in LMDB   slot_file the records
reconcile: the parts of `tiers/check.py`
inventory: which stores there are, without opening one
"""

from .store import SsdStore

__all__ = ["SsdStore"]
