# SPDX-License-Identifier: Apache-2.0
"""New K and V written into the pool, in the pool's own type."""
