# SPDX-License-Identifier: Apache-2.0
"""Paged attention: decode and prefill, in Triton and in plain torch."""
