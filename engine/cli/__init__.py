# SPDX-License-Identifier: Apache-2.0
"""The `stratakv` command. The modules of a subcommand are imported when the subcommand runs."""
