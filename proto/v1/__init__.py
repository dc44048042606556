# SPDX-License-Identifier: Apache-2.0
"""Version 1 of the wire format (`stratakv.cache.v1`); imports nothing else of ours."""
