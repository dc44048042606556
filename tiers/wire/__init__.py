# SPDX-License-Identifier: Apache-2.0
"""What both ends of the cache service speak: messages, frames, limits and status codes."""
