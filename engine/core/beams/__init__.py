# SPDX-License-Identifier: Apache-2.0
"""Beam search: which continuations are kept, and the requests that compute them."""
