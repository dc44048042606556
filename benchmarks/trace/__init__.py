# SPDX-License-Identifier: Apache-2.0
"""Keeps `stratakv bench trace`: request traces replayed against eviction and admission."""
