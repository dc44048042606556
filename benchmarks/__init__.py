# SPDX-License-Identifier: Apache-2.0
"""Keeps the benchmarks behind `stratakv bench`; only the command line imports it."""
