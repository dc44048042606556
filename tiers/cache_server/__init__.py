# SPDX-License-Identifier: Apache-2.0
"""The cache server: stores the blocks of many engines, by tenant, and serves them over gRPC."""
