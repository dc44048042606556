# SPDX-License-Identifier: Apache-2.0
"""Keeps what happens inside a step, on the device side; never imports the API or the CLI."""
