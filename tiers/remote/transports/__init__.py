# SPDX-License-Identifier: Apache-2.0
"""The transports of a client's blocks: data connection, shared memory, gRPC stream."""
