# SPDX-License-Identifier: Apache-2.0
"""The routes of the HTTP server. No module in engine/api imports the worker."""
