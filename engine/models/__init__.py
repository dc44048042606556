# SPDX-License-Identifier: Apache-2.0
"""Model architectures, loading of models, and the embedded model. Never imports the API server."""
