# SPDX-License-Identifier: Apache-2.0
"""Who may call the cache server, as which tenant, and how much of it each may take."""
