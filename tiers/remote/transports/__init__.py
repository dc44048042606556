# SPDX-License-Identifier: Apache-2.0
"""The ways in which a client moves blocks: data connection, shared memory, gRPC stream."""
