# SPDX-License-Identifier: Apache-2.0
"""An engine's slab, served to other engines."""
