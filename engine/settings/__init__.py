# SPDX-License-Identifier: Apache-2.0
"""Where options come from: flags, environment and a file, in layers over the defaults."""
