# SPDX-License-Identifier: Apache-2.0
"""Processes and threads with time limits for grammar work: if one hangs, it is killed or abandoned,
and replaced."""
