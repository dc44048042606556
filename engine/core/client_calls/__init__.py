# SPDX-License-Identifier: Apache-2.0
"""The calls of clients, and results that come later."""
