# SPDX-License-Identifier: Apache-2.0
"""The engine core: it joins model, pool, tiers and scheduler; with its loop and its process."""
