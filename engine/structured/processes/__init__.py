# SPDX-License-Identifier: Apache-2.0
"""Grammars in processes and threads with limits: if one hangs, it is killed or left behind, and
replaced."""
