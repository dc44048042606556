# SPDX-License-Identifier: Apache-2.0
"""Processes and threads with time limits for grammar work. A hanging process is killed, a hanging
thread abandoned; a new one replaces it."""
