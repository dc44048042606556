# SPDX-License-Identifier: Apache-2.0
"""The work of a layer between its matrix products, one kernel each: the norm, the gate, and rotary
positions with the write of K and V.

Their plain twins are functions elsewhere, which run if these do not: those of
`engine/models/layers.py` and `rope.py`, and `write_kv`. Results are rounded where those round.
"""
