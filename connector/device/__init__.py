# SPDX-License-Identifier: Apache-2.0
"""The connector's copy devices: streams, events, copies. Never imports the engine."""
