# SPDX-License-Identifier: Apache-2.0
"""Keeps what changes logits before a token is drawn; never imports the scheduler or the API."""
