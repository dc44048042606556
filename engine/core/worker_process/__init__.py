# SPDX-License-Identifier: Apache-2.0
"""The model in a process of its own: its executor, its loop and their messages."""
