# SPDX-License-Identifier: Apache-2.0
"""Access to the cache server: credentials, tenants, and each tenant's share of calls."""
