# SPDX-License-Identifier: Apache-2.0
"""The cache service: a server that keeps blocks for many engines, and the tier that asks it."""
