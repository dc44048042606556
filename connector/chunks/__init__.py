# SPDX-License-Identifier: Apache-2.0
"""Our tiers for another project's engine, which gives names and bytes and keeps its own pool.

settings.py   what the operator may set, as that engine's configuration has it
build.py      slab, stores and hierarchy out of it, for chunks of one size
tiers.py      store, look up and load, each with an end in time
"""
