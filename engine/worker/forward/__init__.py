# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a step: its inputs on the device, its attention, and its CUDA graphs."""
