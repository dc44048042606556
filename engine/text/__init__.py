# SPDX-License-Identifier: Apache-2.0
"""Keeps the way between text and token ids, and from a request's tokens to its answer."""
