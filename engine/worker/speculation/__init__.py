# SPDX-License-Identifier: Apache-2.0
"""Draft tokens: who proposes them, and which of them the model confirms."""
