# SPDX-License-Identifier: Apache-2.0
"""The parts that benchmarks share: reports, pictures, peers, clients and comparisons in pairs."""
