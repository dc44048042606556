# SPDX-License-Identifier: Apache-2.0
"""The model architectures, their loading and the embedded model; never imports the API."""
