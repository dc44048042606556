# SPDX-License-Identifier: Apache-2.0
"""How blocks get in and out of the cache server: gRPC streams, sockets and shared memory."""
