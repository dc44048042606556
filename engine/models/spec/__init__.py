# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads: their specification, and the layers over a model's hidden states."""
