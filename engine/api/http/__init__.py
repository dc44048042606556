# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: uvicorn, TLS, keys and what is in flight."""
