# SPDX-License-Identifier: Apache-2.0
"""The cache server's ways to move blocks: gRPC streams, sockets, shared memory."""
