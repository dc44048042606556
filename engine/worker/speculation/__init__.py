# SPDX-License-Identifier: Apache-2.0
"""Draft tokens: the proposers, and the check of drafts by the model."""
