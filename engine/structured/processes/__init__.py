# SPDX-License-Identifier: Apache-2.0
"""Grammars in processes and threads with limits: a hanging one is killed or left, and replaced."""
