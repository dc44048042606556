# SPDX-License-Identifier: Apache-2.0
"""The HTTP server: uvicorn, TLS, API keys, and limits on connections and websockets."""
