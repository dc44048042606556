# SPDX-License-Identifier: Apache-2.0
"""Requests that continue others in the blocks that these have left: beam searches, sessions."""
