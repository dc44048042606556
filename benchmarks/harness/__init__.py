# SPDX-License-Identifier: Apache-2.0
"""Parts that all benchmarks share: reports, pictures, peers, clients and comparisons in pairs."""
