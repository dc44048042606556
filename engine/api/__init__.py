# SPDX-License-Identifier: Apache-2.0
"""Keeps the HTTP front; never imports the worker."""
