# SPDX-License-Identifier: Apache-2.0
"""Processes of ours: how they are started, and locks that know which one they are of."""
