# SPDX-License-Identifier: Apache-2.0
"""Costs of loads and of recomputing: measured rates, and the choice between the two."""
