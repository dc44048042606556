# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: the proposers of draft tokens, and the check of drafts by the model."""
