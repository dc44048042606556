# SPDX-License-Identifier: Apache-2.0
"""The protocol of the cache service, for both ends: messages, frames, limits and status codes."""
