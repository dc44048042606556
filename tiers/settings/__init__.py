# SPDX-License-Identifier: Apache-2.0
"""Settings of all parts of the system: readers and checks. Imports no other part of `tiers`.

option      one option, and fields of value objects that are options
readers     from text, or from Python, YAML and TOML, to values
file        the layer of a YAML or TOML file
values, sizes, format, suggestions    bounds, units and words of messages"""
