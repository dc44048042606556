# SPDX-License-Identifier: Apache-2.0
"""Reads the pictures of requests from URLs, checks and decodes them, and makes arrays of pixels."""
