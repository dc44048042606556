# SPDX-License-Identifier: Apache-2.0
"""Options: their records, and the layers of flags, environment and file over the defaults."""
