# SPDX-License-Identifier: Apache-2.0
"""A model on disk or from the Hub: its files, their fields and its weights."""
