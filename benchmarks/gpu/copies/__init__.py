# SPDX-License-Identifier: Apache-2.0
"""Blocks between the device and the CPU: methods, devices and interference with decode."""
