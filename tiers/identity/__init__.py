# SPDX-License-Identifier: Apache-2.0
"""Digests of the files that decide a model's tokens."""
