# SPDX-License-Identifier: Apache-2.0
"""Layers that carry a state (Mamba-2, gated delta rule, convolution) and their state's slots."""
