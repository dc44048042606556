# SPDX-License-Identifier: Apache-2.0
"""Computes steps on the device; never imports the API or the CLI."""
