# SPDX-License-Identifier: Apache-2.0
"""The HTTP front: the server's routes. No module in this folder imports the worker."""
