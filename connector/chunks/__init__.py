# SPDX-License-Identifier: Apache-2.0
"""Our tiers for another project's engine, which gives names and bytes and keeps its own pool.

settings.py   what the operator may set, as that engine's configuration has it
versions.py   which versions of it are supported
build.py      slab, stores and hierarchy out of the settings, and a look at the cache servers
mover.py      the copies, and the thread that makes them and drives the hierarchy
failed.py     chunks that are not found for a while, since their load failed
tiers.py      store, look up and load for a host that waits for answers, each with an end in time
"""
