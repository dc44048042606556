# SPDX-License-Identifier: Apache-2.0
"""Keeps what the connector asks of a device: streams, events, copies; never imports the engine."""
