# SPDX-License-Identifier: Apache-2.0
"""The cache service over loopback, compared with raw sockets and memory copies of the same run."""
