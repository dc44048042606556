# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench trace`: request traces replayed against eviction and admission."""
