# SPDX-License-Identifier: Apache-2.0
"""Implements the connector's devices: streams, events, copies; never imports the engine."""
