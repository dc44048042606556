# SPDX-License-Identifier: Apache-2.0
"""Option definitions, and the reading of options from flags, environment and file."""
