# SPDX-License-Identifier: Apache-2.0
"""Engines that read each other's slabs: an engine serves its own, and loads out of others'."""
