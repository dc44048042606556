# SPDX-License-Identifier: Apache-2.0
"""Clients of the engine core, which runs in its own process or in the client's process."""
