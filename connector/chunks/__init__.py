# SPDX-License-Identifier: Apache-2.0
"""The tiers below another project's engine. That engine names its chunks and keeps its own pool.

chunk_settings.py       the operator's settings, in that engine's configuration
supported_versions.py   the versions of it that are supported
model_name.py           a name for the model that it computes with
build.py                slab, stores and hierarchy out of the settings, and a look at servers
mover.py                the copies, and the thread that makes them and drives the hierarchy
failed.py               chunks that are not found for a while, since their load failed
tiers.py                store, look up and load for a host that waits, each with a time limit
"""
