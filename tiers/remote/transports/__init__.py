# SPDX-License-Identifier: Apache-2.0
"""A client's transports of blocks: data connection, shared memory, gRPC stream."""
