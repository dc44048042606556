# SPDX-License-Identifier: Apache-2.0
"""Grammars in processes and threads that have limits: what hangs is killed and replaced."""
