# SPDX-License-Identifier: Apache-2.0
"""Digests of the files that determine a model's tokens."""
