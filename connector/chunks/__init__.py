# SPDX-License-Identifier: Apache-2.0
"""Tiers below the engine of another project (the host), with its own pool and chunk keys.

chunk_settings.py       the operator's settings, in the host's configuration
supported_versions.py   the supported versions of the host
model_name.py           a name for the host's model
build.py                builds the tiers from the settings, and asks the cache servers first
mover.py                a thread that makes the copies and calls the hierarchy
failed.py               chunks that look-ups miss for a while, because their load failed
tiers.py                stores, look-ups and loads with time limits, for a host that waits"""
