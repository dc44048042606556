# SPDX-License-Identifier: Apache-2.0
"""The transports of blocks in and out of the cache server: gRPC streams, sockets, shared memory."""
