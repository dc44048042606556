# SPDX-License-Identifier: Apache-2.0
"""The HTTP front. No module here imports the worker."""
