# SPDX-License-Identifier: Apache-2.0
"""The SSD tier, which keeps KV blocks on a local disk. Imports no torch, connector or engine.

store.py           the store of the hierarchy; look-ups
disk_array.py      several stores as one
reader.py          slots → buffers, verified          writer.py    buffers → slots → rows, in order
index/             the block of each slot, in memory and in LMDB
disk/              the file of slots, and the threads that read and write it
folder/            opens a store at a path: lock, identity, other formats, sizes
store_check.py     index against records, of a store that is not open"""

from .store import SsdStore

__all__ = ["SsdStore"]
