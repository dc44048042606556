# SPDX-License-Identifier: Apache-2.0
"""The `stratakv` command. Each subcommand imports its modules when it runs."""
