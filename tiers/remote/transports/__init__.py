# SPDX-License-Identifier: Apache-2.0
"""How a client moves blocks: by a data connection, by shared memory, by a gRPC stream."""
