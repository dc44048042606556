# SPDX-License-Identifier: Apache-2.0
"""The specification of a model: its layers, sizes and parts, read from config.json."""
