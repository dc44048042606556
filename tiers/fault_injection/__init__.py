# SPDX-License-Identifier: Apache-2.0
"""Faults on purpose: any store wrapped so that chosen calls fail, stall or lie."""
