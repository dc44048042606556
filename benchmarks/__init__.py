# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that `stratakv bench` runs. Only the command line imports this package."""
