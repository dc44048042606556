# SPDX-License-Identifier: Apache-2.0
"""How settings are read, below everything that has some; imports nothing of the tiers but itself.

option      one option, and fields of value objects that are options
readers     from text, or from Python, YAML and TOML, to values
file        the layer of a YAML or TOML file
values, sizes, format, suggestions    bounds, units and words of messages
"""
