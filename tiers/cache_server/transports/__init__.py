# SPDX-License-Identifier: Apache-2.0
"""The cache server's transports of blocks: gRPC streams, sockets, shared memory."""
