# SPDX-License-Identifier: Apache-2.0
"""Keeps the `stratakv` command; each subcommand imports what it needs when it runs."""
