# SPDX-License-Identifier: Apache-2.0
"""The protocol of the cache service, for client and server: messages, limits and status codes."""
