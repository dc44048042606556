# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics and the line of statistics in the log."""
