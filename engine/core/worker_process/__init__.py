# SPDX-License-Identifier: Apache-2.0
"""Runs the model in another process: the executor, the worker's loop, and their messages."""
