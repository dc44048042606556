# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads (speculative decoding): their specification, and their layers."""
