# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench service`: the cache service over loopback, compared with raw sockets and
memcpy."""
